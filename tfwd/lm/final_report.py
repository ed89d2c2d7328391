"""Writes and prints the report of a run: perplexities, learning curves and a sample."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from tfwd.lm.data.corpus import Corpus
from tfwd.lm.evaluation import Evaluation
from tfwd.lm.losses import PERPLEXITY
from tfwd.lm.sampling import generate
from tfwd.lm.trainer import Trainer
from tfwd.runs.errors import UserError
from tfwd.runs.storage.file_access import write_file
from tfwd.runs.storage.learning_curves import number_text
from tfwd.runs.storage.run_folder import RunFolder
from tfwd.runs.training.display import Display
from tfwd.runs.training.report_parts import (
    complete,
    counts,
    draw_curves,
    facts_line,
    finite,
    results_table,
    show_report,
    speed,
)


def write_report(trainer: Trainer, corpus: Corpus) -> dict[str, Any]:
    """Writes `report/`: `summary.json`, `curves.png` and `sample.txt`.

    Args:
        trainer: the trainer of a finished run. Afterwards its model has the best weights.
        corpus: the data of the run.

    Returns:
        The summary.

    Raises:
        Stopped: a signal arrived. Running the same command again makes the report.
        UserError: a file cannot be written.
    """
    evaluations = trainer.evaluate_best()
    return trainer.workers.on_chief(lambda: _write(trainer, corpus, evaluations))


def _write(trainer: Trainer, corpus: Corpus, evaluations: dict[str, Evaluation]) -> dict[str, Any]:
    folder, sample = trainer.folder, trainer.config.sample
    vocabulary = corpus.vocabulary
    summary = {
        "name": corpus.name,
        "level": vocabulary.level,
        **counts(trainer.progress),
        "texts": {
            name: {
                "nats": finite(found.nats),
                "perplexity": finite(found.perplexity),
                "bits": finite(found.bits),
                "tokens": found.tokens,
            }
            for name, found in evaluations.items()
        },
        "parameters": trainer.parameters,
        "vocabulary": len(vocabulary),
        "tokens_per_second": speed(trainer.progress),
    }
    draw_curves(folder, PERPLEXITY, corpus.name)
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
        write_file(folder.report / "sample.txt", text.rstrip("\n") + "\n")
    return complete(folder, summary)


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
    unit = "character" if summary["level"] == "char" else "word"
    rows = {
        name: (
            number_text(found["perplexity"]),
            number_text(found["bits"], 3),
            f"{found['tokens']:,}",
        )
        for name, found in summary["texts"].items()
    }
    return results_table("text", ("perplexity", f"bits per {unit}", "tokens"), rows)


def facts(summary: dict[str, Any]) -> str:
    """Returns the line below the table."""
    sizes = f"{summary['parameters']:,} parameters", f"vocabulary of {summary['vocabulary']:,}"
    return facts_line(summary, sizes, "token", digits=0)


def show(summary: dict[str, Any], folder: RunFolder, display: Display) -> None:
    """Prints the table, the sample, and the paths of the other results."""
    sample = folder.report / "sample.txt"
    paths = {"curves": folder.report / "curves.png", "best weights": folder.best.folder}
    heading = "a sample of its text"
    show_report(display, table(summary), facts(summary), sample, heading, paths)
