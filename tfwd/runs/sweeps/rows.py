"""The trials of a sweep as rows: for the tables, the plots and `trials.csv`."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Mapping
from typing import Any

from keras_tuner.engine.trial import Trial, TrialStatus

from tfwd.runs.files import write_atomically
from tfwd.runs.program import Score
from tfwd.runs.sweeps.folder import SweepFolder
from tfwd.runs.validators import shown
from tfwd.tuning import reporter
from tfwd.tuning.space import Spec, read
from tfwd.tuning.workers import error_text

RUNNING, DONE, FAILED, WAITING = "running", "done", "failed", "waiting"
OBJECTIVE = "loss"


@dataclasses.dataclass
class Row:
    """A trial.

    Attributes:
        trial: its number.
        status: `RUNNING`, `DONE`, `FAILED` or `WAITING` (its process was stopped or lost).
        values: by config key.
        loss: the lowest validation loss, nats a token, the mean over the runs; None if unknown.
        losses: of each run.
        epochs: that were trained, in the longest run, with those of the promoted trial.
        budget: the epochs that were to be trained.
        seconds: what the trial took, in all its parts and without the promoted trial's.
        parent: the trial that was promoted to this one, "" for none.
        seeds: of the runs.
        message: why it failed.
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
    """The row of a trial as keras-tuner has it."""
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
        row.seconds = folder.spent(trial.trial_id) or None
    if status == FAILED:
        row.message = reason(trial, folder)
    return row


def reason(trial: Trial, folder: SweepFolder) -> str:
    """Why a trial failed, in one line; the whole is in `error.txt` in its folder."""
    text = error_text(trial, folder.trial(trial.trial_id))
    return reporter.reason(text) or "no reason is known"


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Those that are done, the best first; of a chain of promotions its last trial only."""
    done = [row for row in rows if row.status == DONE]
    promoted = {row.parent for row in done}
    return sorted((r for r in done if r.trial not in promoted), key=lambda r: (r.loss, r.trial))


def write_csv(rows: Iterable[Row], keys: Iterable[str], folder: SweepFolder) -> None:
    """Writes `trials.csv`: a line a trial.

    Raises:
        UserError: it cannot be written.
    """
    out = io.StringIO()
    empty = Row("", "", dict.fromkeys(keys, ""))
    score = folder.program.score
    writer = csv.DictWriter(out, list(_record(empty, score)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_record(row, score) for row in rows)
    write_atomically(folder.table, out.getvalue())


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
