"""The end of a run: the best weights on the three texts, the pictures and a sample."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from typing import Any

from tfwd.lm import report
from tfwd.lm.display import Display
from tfwd.lm.errors import UserError
from tfwd.lm.files import read_bytes, read_json, write_atomically
from tfwd.lm.folder import RunFolder
from tfwd.lm.metrics import read_metrics
from tfwd.lm.sampling import generate
from tfwd.lm.trainer import Trainer
from tfwd.lm.vocabulary import Vocabulary


def finish(trainer: Trainer, vocabulary: Vocabulary, text_name: str) -> dict[str, Any]:
    """Writes `report/`: `summary.json`, `curves.png` and `sample.txt`.

    Args:
        trainer: a run that is finished. Its model has the best weights afterwards.
        vocabulary: the model's.
        text_name: what the text is called.

    Returns:
        The summary.

    Raises:
        Stopped: a signal came; the same command makes the report.
        UserError: a file cannot be written.
    """
    folder, progress, sample = trainer.folder, trainer.progress, trainer.config.sample
    evaluations = trainer.evaluate_best()
    summary = {
        "name": text_name,
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
    try:
        report.curves(read_metrics(folder.metrics), folder.report / "curves.png", text_name)
    except OSError as error:
        raise UserError(f"cannot write {folder.report}: {error.strerror}") from error
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
        except UserError as error:  # half precision that overflows: the run is done all the same
            text = f"no sample: {error}"
        write_atomically(folder.report / "sample.txt", text.rstrip("\n") + "\n")
    # Last: with it the report is whole.
    write_atomically(folder.report / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def finished_before(
    trainer: Trainer, say: Callable[[str], object] = print
) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do, else `None`.

    Args:
        trainer: the run.
        say: called with a line if there is a summary that cannot be used; it is made again.
    """
    path = trainer.folder.report / "summary.json"
    if not trainer.finished or not os.path.lexists(path):
        return None
    try:
        summary = read_json(path, "summary")
        if summary["step"] != trainer.progress.step:
            return None
        report.table(summary), report.facts(summary)
        return summary
    except UserError as error:
        say(f"{error}; it is made again")
    except Exception:  # any form that the table is not made for
        say(f"{path} is no summary of a run; it is made again")
    return None


def show(summary: dict[str, Any], folder: RunFolder, display: Display) -> None:
    """Prints the table, the sample, and where the rest is."""
    display.console.print(report.table(summary))
    display.line(report.facts(summary))
    sample = folder.report / "sample.txt"
    if sample.exists():
        display.line("\na sample of what it writes:")
        display.line(read_bytes(sample).decode("utf-8", "backslashreplace"))
    display.line(f"curves: {folder.report / 'curves.png'}   best weights: {folder.best.folder}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
