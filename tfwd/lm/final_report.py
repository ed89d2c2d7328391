"""Writes and prints the report of a run: perplexities, learning curves and a sample."""

from __future__ import annotations

import json
import math
from typing import Any

from rich import box
from rich.table import Table

from tfwd.lm.data.vocabulary import Corpus
from tfwd.lm.losses import PERPLEXITY
from tfwd.lm.sampling import generate
from tfwd.lm.trainer import Trainer
from tfwd.runs.errors import UserError, as_user_error
from tfwd.runs.storage.files import read_bytes, write_atomically
from tfwd.runs.storage.folder import RunFolder
from tfwd.runs.storage.learning_curves import curves, number_text
from tfwd.runs.storage.metrics import read_metrics
from tfwd.runs.training.display import Display


def write_report(trainer: Trainer, corpus: Corpus) -> dict[str, Any]:
    """Writes `report/`: `summary.json`, `curves.png` and `sample.txt`.

    Args:
        trainer: the trainer of a finished run. Afterwards its model has the best weights.
        corpus: the data of the run.

    Returns:
        The summary.

    Raises:
        Stopped: a signal arrived. The same command then makes the report.
        UserError: a file cannot be written.
    """
    folder, progress, sample = trainer.folder, trainer.progress, trainer.config.sample
    vocabulary = corpus.vocabulary
    evaluations = trainer.evaluate_best()
    summary = {
        "name": corpus.name,
        "level": vocabulary.level,
        "step": progress.step,
        "epochs": progress.epoch,
        "best_epoch": progress.best_epoch,
        "texts": {
            name: {
                "nats": _finite(found.nats),
                "perplexity": _finite(found.perplexity),
                "bits": _finite(found.bits),
                "tokens": found.tokens,
            }
            for name, found in evaluations.items()
        },
        "parameters": trainer.parameters,
        "vocabulary": len(vocabulary),
        "tokens_per_second": progress.tokens / progress.seconds if progress.seconds else None,
    }
    with as_user_error(f"cannot write {folder.report}", OSError):
        records = read_metrics(folder.metrics)
        curves(records, folder.report / "curves.png", PERPLEXITY, corpus.name)
    if sample.tokens:
        try:
            text = generate(
                trainer.model,
                vocabulary,
                tokens=sample.tokens,
                temperature=sample.temperature,
                top_k=sample.top_k,
                seed=trainer.config.seed,
                prompt=sample.prompt,
            )
        except UserError as error:  # overflow in half precision: the run is complete anyway
            text = f"no sample: {error}"
        write_atomically(folder.report / "sample.txt", text.rstrip("\n") + "\n")
    # Last: it marks the report as complete.
    write_atomically(folder.report / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def table(summary: dict[str, Any]) -> Table:
    """Returns the table of the final report.

    Args:
        summary: the content of `report/summary.json`. Used here: "texts" (by name: "perplexity",
            "bits", "tokens") and "level".

    Returns:
        A table for a rich console.

    Example:
    >>> texts = {"test": {"perplexity": 8.0, "bits": 3.0, "tokens": 1000}}
    >>> [column.header for column in table({"texts": texts, "level": "char"}).columns]
    ['text', 'perplexity', 'bits per character', 'tokens']
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("text")
    unit = "character" if summary["level"] == "char" else "word"
    for name in ("perplexity", f"bits per {unit}", "tokens"):
        made.add_column(name, justify="right")
    for name, found in summary["texts"].items():
        made.add_row(
            name,
            number_text(found["perplexity"]),
            number_text(found["bits"], 3),
            f"{found['tokens']:,}",
        )
    return made


def facts(summary: dict[str, Any]) -> str:
    """Returns the line below the table."""
    speed = summary["tokens_per_second"]
    parts = [
        f"weights of epoch {summary['best_epoch']} of {summary['epochs']}",
        f"{summary['parameters']:,} parameters",
        f"vocabulary of {summary['vocabulary']:,}",
    ]
    if speed:
        parts.append(f"{speed:,.0f} tokens per second in training")
    return ", ".join(parts)


def show(summary: dict[str, Any], folder: RunFolder, display: Display) -> None:
    """Prints the table, the sample, and the paths of the other results."""
    display.console.print(table(summary))
    display.line(facts(summary))
    sample = folder.report / "sample.txt"
    if sample.exists():
        display.line("\na sample of its text:")
        display.line(read_bytes(sample).decode("utf-8", "backslashreplace"))
    display.line(f"curves: {folder.report / 'curves.png'}   best weights: {folder.best.folder}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
