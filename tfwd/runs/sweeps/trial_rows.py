"""Rows of a sweep's trials for the table, the plot and `trials.csv`.

The table fits the console. It cuts off no heading and no value.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from keras_tuner.engine.trial import Trial, TrialStatus
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from tfwd.runs.interfaces import Score
from tfwd.runs.settings.validators import shown
from tfwd.runs.storage.file_access import write_file
from tfwd.runs.sweeps.sweep_folder import SweepFolder
from tfwd.tuning import trial_failure_reasons
from tfwd.tuning.search_space import Spec, read

RUNNING, DONE, FAILED, WAITING = "running", "done", "failed", "waiting"
OBJECTIVE = "loss"
_WIDE = 10_000


@dataclasses.dataclass
class Row:
    """Result of a trial.

    Attributes:
        trial: str. The trial's number.
        status: `RUNNING`, `DONE`, `FAILED` or `WAITING` (its process was stopped or lost).
        values: the chosen values, by config key.
        loss: float. The lowest validation loss, as the mean over the runs; None if unknown.
        losses: the lowest validation loss of each run.
        epochs: int. The trained epochs of the longest run, including the promoted trial's.
        budget: int. The planned epochs.
        seconds: float. The time of all parts of the trial, without the promoted trial's.
        parent: str. The number of the trial that was promoted to this trial; "" for none.
        seeds: the seeds of the runs.
        message: str. The reason why the trial failed.
    """

    trial: str
    status: str
    values: dict[str, Any]
    loss: float | None = None
    losses: tuple[float, ...] = ()
    epochs: int | None = None
    budget: int | None = None
    seconds: float | None = None
    parent: str = ""
    seeds: tuple[int, ...] = ()
    message: str = ""


def make_row(trial: Trial, space: Mapping[str, Spec], folder: SweepFolder) -> Row:
    """Returns the row of a keras-tuner trial."""
    values = trial.hyperparameters.values
    status = {TrialStatus.COMPLETED: DONE, TrialStatus.RUNNING: RUNNING}.get(trial.status, FAILED)
    found = {
        name: trial.metrics.get_best_value(name) for name in trial.metrics.metrics if status == DONE
    }
    row = Row(
        trial=trial.trial_id,
        status=status,
        values=read(space, values),
        budget=values.get("tuner/epochs"),
        parent=values.get("tuner/trial_id", ""),
    )
    if found:
        runs = sorted(name for name in found if name.startswith("loss-"))
        row.loss = float(found[OBJECTIVE])
        row.losses = tuple(float(found[name]) for name in runs)
        row.epochs, row.seconds = int(found["epochs"]), float(found["seconds"])
    elif status != RUNNING:
        row.seconds = folder.seconds_spent(trial.trial_id) or None
    if status == FAILED:
        reason = trial_failure_reasons.reason(trial, folder.trial_folder(trial.trial_id))
        row.message = reason or "the reason is not known"
    return row


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Returns the finished trials, the best first. Omits trials that were promoted."""
    done = [row for row in rows if row.status == DONE]
    promoted = {row.parent for row in done}
    return sorted((r for r in done if r.trial not in promoted), key=lambda r: (r.loss, r.trial))


def write_csv(rows: Iterable[Row], keys: Iterable[str], folder: SweepFolder) -> None:
    """Writes `trials.csv`, with one line per trial.

    Raises:
        UserError: the file cannot be written.
    """
    out = io.StringIO()
    empty = Row("", "", dict.fromkeys(keys, ""))
    score = folder.program.score
    writer = csv.DictWriter(out, list(_record(empty, score)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_record(row, score) for row in rows)
    write_file(folder.table, out.getvalue())


def _record(row: Row, score: Score) -> dict[str, str]:
    return {
        "trial": row.trial,
        "status": row.status,
        **{key: shown(value) for key, value in row.values.items()},
        f"valid_{score.name}": _text(None if row.loss is None else score.of_loss(row.loss)),
        "valid_loss": _text(row.loss),
        "run_losses": " ".join(map(_text, row.losses)),
        "epochs": _text(row.epochs),
        "seconds": "" if row.seconds is None else f"{row.seconds:.1f}",
        "seeds": " ".join(map(str, row.seeds)),
        "promoted_from": row.parent,
        "message": row.message,
    }


def _text(value: float | int | None) -> str:
    return "" if value is None else repr(value)


class Line(NamedTuple):
    """Row of the table, as text."""

    trial: str
    values: Sequence[str]
    score: str
    epochs: str
    time: str
    remark: str
    style: str


def table(lines: Sequence[Line], names: Sequence[str], score: str, console: Console) -> Table:
    """Returns the table in the first layout that fits the console.

    The headings are the names, the names in two lines, or letters with a legend. If no layout fits,
    all values are in one column, each with its name.

    Args:
        lines: the trials.
        names: the names of the varied keys.
        score: str. The heading of the column of scores.
        console: the console, whose width is the limit.
    """
    letters = [_letter(number) for number in range(len(names))]
    folded = [name.replace("_", "_\n") for name in names]
    narrow = [line._replace(remark=line.remark.replace(", ", ",\n")) for line in lines]
    for rows, heads, head in (
        (lines, names, score),
        (narrow, folded, score.replace(" ", "\n")),
        (narrow, letters, score.replace(" ", "\n")),
    ):
        made = _table(rows, heads, head)
        wide = console.options.update_width(_WIDE)
        if Measurement.get(console, wide, made).maximum <= console.width:
            break
    else:
        together = [
            line._replace(values=["  ".join(map("=".join, zip(names, line.values, strict=True)))])
            for line in narrow
        ]
        return _table(together, ["values"], score.replace(" ", "\n"), "left")
    if heads is letters:
        pairs = zip(letters, names, strict=True)
        made.caption = ", ".join(f"{letter}: {name}" for letter, name in pairs)
        made.caption_justify = "left"
    return made


def _table(
    lines: Sequence[Line],
    heads: Sequence[str],
    score: str,
    justify: Literal["left", "right"] = "right",
) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    made.add_column("trial", no_wrap=True)
    for head in heads:
        made.add_column(head, justify=justify, overflow="fold")
    for head in (score, "epochs", "time"):
        made.add_column(head, justify="right", no_wrap=True)
    made.add_column("", overflow="fold")
    for line in lines:
        cells = (line.trial, *line.values, line.score, line.epochs, line.time, line.remark)
        made.add_row(*cells, style=line.style)
    return made


def reasons(rows: Iterable[Row]) -> list[str]:
    """Returns a line for each reason why trials failed."""
    failed: dict[str, list[str]] = {}
    for row in rows:
        if row.status == FAILED:
            failed.setdefault(row.message, []).append(row.trial)
    return [
        f"failed: trial{'s' if len(trials) > 1 else ''} {', '.join(sorted(trials))}: {message}"
        for message, trials in failed.items()
    ]


def short_names(space: Mapping[str, Any]) -> dict[str, str]:
    """Returns the keys without their groups, except where two keys would be equal.

    Example:
    >>> short_names({"model.weight_dropout": None, "optimizer.learning_rate": None})
    {'model.weight_dropout': 'weight_dropout', 'optimizer.learning_rate': 'learning_rate'}
    """
    lasts = [key.rpartition(".")[2] for key in space]
    return {
        key: last if lasts.count(last) == 1 else key for key, last in zip(space, lasts, strict=True)
    }


def _letter(number: int) -> str:
    rounds, index = divmod(number, 26)
    return string.ascii_lowercase[index] + (str(rounds) if rounds else "")
