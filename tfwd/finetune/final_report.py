"""Writes and prints the report of a run: scores, curves, confusion matrix, some labelled texts."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table

from tfwd.finetune import confusion_plot, scores
from tfwd.finetune.data.corpus import Corpus
from tfwd.finetune.evaluation import Evaluation
from tfwd.finetune.scores import LOSS
from tfwd.finetune.trainer import Trainer
from tfwd.runs.errors import as_user_error
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

_SHARES = {"accuracy": "accuracy", "macro_f1": "macro F1"}


def write_report(trainer: Trainer, corpus: Corpus) -> dict[str, Any]:
    """Writes `report/`: `summary.json`, `curves.png`, `confusion.png` and `examples.txt`.

    Args:
        trainer: the trainer of a finished run. Afterwards its model has the best weights.
        corpus: the data of the run.

    Returns:
        The summary.

    Raises:
        Stopped: a signal arrived. Running the same command again makes the report.
        UserError: a file cannot be written.
    """
    found = trainer.evaluate_best()
    return trainer.workers.on_chief(lambda: _write(trainer, corpus, found))


def _write(trainer: Trainer, corpus: Corpus, found: dict[str, Evaluation]) -> dict[str, Any]:
    folder, labels = trainer.folder, corpus.vocabulary.labels
    summary = {
        "name": corpus.name,
        **counts(trainer.progress),
        "texts": {name: _scores(found[name], corpus, name) for name in found},
        "classes": labels,
        "confusion": found["test"].confusion.tolist(),
        "parameters": trainer.parameters,
        "texts_per_second": speed(trainer.progress),
    }
    draw_curves(folder, LOSS, corpus.name, _SHARES)
    with as_user_error(f"cannot write {folder.report}", OSError):
        title = f"{corpus.name}, test"
        confusion_plot.draw(found["test"].confusion, labels, folder.report / "confusion.png", title)
    shown = _examples(found["test"], corpus, trainer.config.report.examples)
    write_file(folder.report / "examples.txt", shown)
    return complete(folder, summary)


def _scores(found: Evaluation, corpus: Corpus, name: str) -> dict[str, Any]:
    return {
        "loss": finite(found.nats),
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
    names = ("accuracy", "macro F1", "loss", "most frequent class", "texts")
    rows = {
        name: (
            f"{found['accuracy']:.2%}",
            f"{found['macro_f1']:.2%}",
            number_text(found["loss"], 3),
            f"{found['majority']:.2%}",
            f"{found['texts']:,}",
        )
        for name, found in summary["texts"].items()
    }
    return results_table("part", names, rows)


def facts(summary: dict[str, Any]) -> str:
    """Returns the line below the table."""
    sizes = f"{summary['parameters']:,} trained weights", f"{len(summary['classes'])} classes"
    return facts_line(summary, sizes, "text", digits=1)


def show(summary: dict[str, Any], folder: RunFolder, display: Display) -> None:
    """Prints the table, some labelled texts, and the paths of the other results."""
    report = folder.report
    paths = {
        "curves": report / "curves.png",
        "confusion matrix": report / "confusion.png",
        "best weights": folder.best.folder,
    }
    heading = "some test texts, with predicted label and probability"
    show_report(display, table(summary), facts(summary), report / "examples.txt", heading, paths)
    display.line(f'new texts: tfwd-classify --workdir={folder.path} --text="..."')
