"""Writes and prints the report of a run: scores, curves, confusion matrix, some labelled texts."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from tfwd.finetune import confusion, scores
from tfwd.finetune.data.vocabulary import Corpus
from tfwd.finetune.evaluation import Evaluation
from tfwd.finetune.scores import LOSS
from tfwd.finetune.trainer import Trainer
from tfwd.runs.errors import as_user_error
from tfwd.runs.storage.files import read_bytes, write_atomically
from tfwd.runs.storage.folder import RunFolder
from tfwd.runs.storage.learning_curves import curves, number_text
from tfwd.runs.storage.metrics import read_metrics
from tfwd.runs.training.display import Display

_SHARES = {"accuracy": "accuracy", "macro_f1": "macro F1"}


def write_report(trainer: Trainer, corpus: Corpus) -> dict[str, Any]:
    """Writes `report/`: `summary.json`, `curves.png`, `confusion.png` and `examples.txt`.

    Args:
        trainer: the trainer of a finished run. Afterwards its model has the best weights.
        corpus: the data of the run.

    Returns:
        The summary.

    Raises:
        Stopped: a signal arrived. The same command then makes the report.
        UserError: a file cannot be written.
    """
    folder, progress, labels = trainer.folder, trainer.progress, corpus.vocabulary.labels
    found = trainer.evaluate_best()
    summary = {
        "name": corpus.name,
        "step": progress.step,
        "epochs": progress.epoch,
        "best_epoch": progress.best_epoch,
        "texts": {name: _scores(found[name], corpus, name) for name in found},
        "classes": labels,
        "confusion": found["test"].confusion.tolist(),
        "parameters": trainer.parameters,
        "texts_per_second": progress.tokens / progress.seconds if progress.seconds else None,
    }
    with as_user_error(f"cannot write {folder.report}", OSError):
        records = read_metrics(folder.metrics)
        curves(records, folder.report / "curves.png", LOSS, corpus.name, _SHARES)
        title = f"{corpus.name}, test"
        confusion.draw(found["test"].confusion, labels, folder.report / "confusion.png", title)
    shown = _examples(found["test"], corpus, trainer.config.report.examples)
    write_atomically(folder.report / "examples.txt", shown)
    # Last: it marks the report as complete.
    write_atomically(folder.report / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _scores(found: Evaluation, corpus: Corpus, name: str) -> dict[str, Any]:
    return {
        "loss": found.nats if math.isfinite(found.nats) else None,
        "accuracy": found.accuracy,
        "macro_f1": found.macro_f1,
        "majority": scores.majority(corpus.encoded[name].labels),
        "texts": len(corpus.texts[name]),
    }


def _examples(found: Evaluation, corpus: Corpus, count: int) -> str:
    """Returns the first test texts after a fixed shuffle, with predicted and true labels."""
    texts, labels = corpus.texts["test"], corpus.vocabulary.labels
    width = max(map(len, labels))
    lines = []
    for number in np.random.default_rng(0).permutation(len(texts))[:count]:
        best = int(found.probabilities[number].argmax())
        true = texts[number].label
        remark = "" if labels[best] == true else f"  (true label: {true})"
        text = texts[number].text
        text = text if len(text) <= 90 else f"{text[:89]}…"
        share = found.probabilities[number, best]
        lines.append(f"{labels[best]:<{width}}  {share:.3f}  {text}{remark}\n")
    return "".join(lines)


def table(summary: dict[str, Any]) -> Table:
    """Returns the table of the final report.

    Args:
        summary: the content of `report/summary.json`. Used here: "texts" (by name: "accuracy",
            "macro_f1", "loss", "majority", "texts").

    Returns:
        A table for a rich console.

    Example:
    >>> found = {"accuracy": 0.9, "macro_f1": 0.8, "loss": 0.3, "majority": 0.5, "texts": 100}
    >>> [column.header for column in table({"texts": {"test": found}}).columns]
    ['part', 'accuracy', 'macro F1', 'loss', 'most frequent class', 'texts']
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("part")
    for name in ("accuracy", "macro F1", "loss", "most frequent class", "texts"):
        made.add_column(name, justify="right")
    for name, found in summary["texts"].items():
        made.add_row(
            name,
            f"{found['accuracy']:.2%}",
            f"{found['macro_f1']:.2%}",
            number_text(found["loss"], 3),
            f"{found['majority']:.2%}",
            f"{found['texts']:,}",
        )
    return made


def facts(summary: dict[str, Any]) -> str:
    """Returns the line below the table."""
    speed = summary["texts_per_second"]
    parts = [
        f"weights of epoch {summary['best_epoch']} of {summary['epochs']}",
        f"{summary['parameters']:,} trained weights",
        f"{len(summary['classes'])} classes",
    ]
    if speed:
        parts.append(f"{speed:,.1f} texts per second in training")
    return ", ".join(parts)


def show(summary: dict[str, Any], folder: RunFolder, display: Display) -> None:
    """Prints the table, some labelled texts, and the paths of the other results."""
    display.console.print(table(summary))
    display.line(facts(summary))
    examples = folder.report / "examples.txt"
    if examples.exists() and examples.stat().st_size:
        display.line("\nsome test texts, with predicted label and probability:")
        display.line(read_bytes(examples).decode("utf-8", "backslashreplace"))
    display.line(
        f"curves: {folder.report / 'curves.png'}   confusion matrix: "
        f"{folder.report / 'confusion.png'}   best weights: {folder.best.folder}"
    )
    display.line(f'new texts: tfwd-classify --workdir={folder.path} --text="..."')
