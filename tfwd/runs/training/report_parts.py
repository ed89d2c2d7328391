"""Parts of the report of a finished run that all programs share: files, counts, table, output."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from tfwd.runs.errors import as_user_error
from tfwd.runs.interfaces import Score
from tfwd.runs.storage.file_access import read_bytes, write_file
from tfwd.runs.storage.learning_curves import curves
from tfwd.runs.storage.metrics import read_metrics
from tfwd.runs.storage.progress import Progress
from tfwd.runs.storage.run_folder import RunFolder
from tfwd.runs.training.display import Display


def counts(progress: Progress) -> dict[str, int]:
    """Returns the steps and epochs of a run, for its summary."""
    return {"step": progress.step, "epochs": progress.epoch, "best_epoch": progress.best_epoch}


def speed(progress: Progress) -> float | None:
    """Returns the number of tokens or texts per second in training, for the summary."""
    return progress.tokens / progress.seconds if progress.seconds else None


def finite(value: float) -> float | None:
    """Returns a number, or `None` for a non-finite number, which JSON cannot store."""
    return value if math.isfinite(value) else None


def draw_curves(
    folder: RunFolder, score: Score, title: str, shares: Mapping[str, str] | None = None
) -> None:
    """Draws `report/curves.png`.

    Args:
        folder: the run folder.
        score: how losses are shown.
        title: str. The title of the picture.
        shares: as in `learning_curves.curves`.

    Raises:
        UserError: the file cannot be written.
    """
    with as_user_error(f"cannot write {folder.report}", OSError):
        records = read_metrics(folder.metrics)
        curves(records, folder.report / "curves.png", score, title, shares)


def complete(folder: RunFolder, summary: dict[str, Any]) -> dict[str, Any]:
    """Writes `report/summary.json`, which marks the report as complete. Returns the summary."""
    write_file(folder.report / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def results_table(part: str, names: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    """Returns a table with a row for each part of the data.

    Args:
        part: header of the first column, which has the names of the parts.
        names: headers of the other columns.
        rows: the cells of each row, by the part's name.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column(part)
    for name in names:
        made.add_column(name, justify="right")
    for name, cells in rows.items():
        made.add_row(name, *cells)
    return made


def facts_line(summary: dict[str, Any], sizes: Sequence[str], unit: str, digits: int) -> str:
    """Returns the line below the table.

    Args:
        summary: the summary of the run.
        sizes: texts with the sizes of model and data, such as "5,000 parameters".
        unit: "token" or "text".
        digits: int. The number of decimal places of the speed.
    """
    per_second = summary[f"{unit}s_per_second"]
    shown = [f"{per_second:,.{digits}f} {unit}s per second in training"] if per_second else []
    best = f"weights of epoch {summary['best_epoch']} of {summary['epochs']}"
    return ", ".join([best, *sizes, *shown])


def show_report(
    display: Display, table: Table, facts: str, extract: Path, heading: str, paths: dict[str, Path]
) -> None:
    """Prints the report of a run.

    Args:
        display: the display of the run.
        table: the table of the results.
        facts: the line below the table.
        extract: path of a text file to print, if it exists and is not empty.
        heading: the line above the text of `extract`.
        paths: paths of the other results, by name.
    """
    display.console.print(table)
    display.line(facts)
    if extract.exists() and extract.stat().st_size:
        display.line(f"\n{heading}:")
        display.line(read_bytes(extract).decode("utf-8", "backslashreplace"))
    display.line("   ".join(f"{name}: {path}" for name, path in paths.items()))
