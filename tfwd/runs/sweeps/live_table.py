"""Shows the trials of a sweep: a live table on a terminal, or a line per trial elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from keras_tuner.engine.trial import Trial
from rich.console import Console
from rich.live import Live
from rich.table import Table

from tfwd.runs.settings.validators import shown
from tfwd.runs.sweeps.sweep_folder import SweepFolder
from tfwd.runs.sweeps.trial_rows import (
    DONE,
    FAILED,
    RUNNING,
    WAITING,
    Line,
    Row,
    make_row,
    ranked,
    short_names,
    table,
)
from tfwd.runs.training.display import Output, duration_text
from tfwd.tuning.search_space import Spec
from tfwd.tuning.trial_watcher import Watcher

_COLOURS = {RUNNING: "cyan", FAILED: "red", WAITING: "yellow"}
_FEWEST = 4  # minimum number of rows to show
_OTHER_LINES = 8  # lines of the terminal for heading, borders, and the text above the table


class Board(Watcher):
    """Watcher that shows a live table of the trials.

    Args:
        space: the varied keys, with their values.
        folder: the `SweepFolder`.
        epochs: int. The epochs of a trial, unless Hyperband sets another number.
        seeds: the seeds of each trial's runs.
        console: the console. Standard output by default.
        clock: function that returns the time in seconds. Tests replace it.
        changed: function that is called when a trial has ended.
        whole: bool. True if the board sees all trials, and therefore knows the best trial. A
            worker's board sees only its own trials.
    """

    def __init__(
        self,
        space: Mapping[str, Spec],
        folder: SweepFolder,
        epochs: int,
        seeds: Sequence[int] = (0,),
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        changed: Callable[[], object] = lambda: None,
        whole: bool = True,
    ):
        super().__init__(folder.trial_folder, clock)
        self.console = console or Output()
        self.rows: dict[str, Row] = {}
        self.total: int | None = None
        self.changed = changed
        self._space, self._folder, self._epochs, self._seeds = space, folder, epochs, tuple(seeds)
        self._whole = whole
        self._now: dict[str, tuple[int, int, float, float]] = {}
        self._names, self._score = short_names(space), folder.program.score
        self._live = Live(
            get_renderable=self._shown,
            console=self.console,
            refresh_per_second=2,
            transient=True,  # the final table replaces it
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Board:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def line(self, text: str) -> None:
        """Prints a line above the table."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def add(self, trial: Trial) -> Row:
        """Adds or updates the row of a keras-tuner trial, without output."""
        row = make_row(trial, self._space, self._folder)
        row.budget = row.budget or self._epochs
        row.seeds = self._seeds
        self.rows[row.trial] = row
        return row

    def mark_stopped(self) -> None:
        """Marks all running trials as waiting, because their process was stopped."""
        for row in self.rows.values():
            if row.status == RUNNING:
                row.status, row.seconds = WAITING, self._folder.seconds_spent(row.trial) or None

    def began(self, trial: Trial) -> None:
        """Notes that a worker started a trial."""
        super().began(trial)
        self.add(trial)
        self._now.pop(trial.trial_id, None)

    def ended(self, trial: Trial) -> None:
        """Shows the result of a trial that ended."""
        row = self.add(trial)
        row.seconds = row.seconds or self.seconds(row.trial)  # the folder is on another machine
        if not self.console.is_terminal:
            best = ranked(self.rows.values()) if self._whole else []
            parts = [f"trial {row.trial}", self._values(row), self._outcome(row)]
            parts += [f"{self._epochs_of(row)} epochs", self._time(row)]
            self.line("  ".join(parts + (["(best)"] if best and best[0] is row else [])))
        elif row.status == FAILED:
            self.line(f"trial {row.trial} failed: {row.message}")
        self.changed()

    def lost(self, trial: Trial, worker: str) -> None:
        """Notes that a worker was silent for too long."""
        self.add(trial).status = WAITING
        super().lost(trial, worker)

    def progress(self, trial: str, run: int, epochs: int, share: float, loss: float) -> None:
        """Updates the progress of a running trial of this process."""
        self._now[trial] = (run, epochs, share, loss)

    def table(self, most: int | None = None) -> Table:
        """Returns the table of all trials, or of the best and newest if there are more than `most`.

        Args:
            most: int. The maximum number of rows; None shows all rows, the best first.
        """
        best = ranked(self.rows.values())
        rest = [row for row in self.rows.values() if row not in best]
        rows = [*best, *sorted(rest, key=lambda row: row.trial)]
        if most is not None and len(rows) > most:
            newest = sorted(rows, key=_number)[-(most - 1) // 2 :]
            first = [row for row in rows if row not in newest][: most - len(newest)]
            rows = [*first, *newest]
        elif most is not None:
            rows = sorted(rows, key=_number)
        lines = [
            Line(
                row.trial,
                [shown(row.values[key]) for key in self._names],
                self._score_of(row),
                self._epochs_of(row),
                self._time(row),
                self._remark(row, bool(best) and row is best[0]),
                "bold" if best and row is best[0] else _COLOURS.get(row.status, ""),
            )
            for row in rows
        ]
        names = list(self._names.values())
        return table(lines, names, f"valid {self._score.name}", self.console)

    def _shown(self) -> Table:
        room = self.console.height - _OTHER_LINES
        table = self.table(most=max(room, _FEWEST))
        lines = len(self.console.render_lines(table)) - _OTHER_LINES
        if lines > room:  # the rows have several lines each
            each = math.ceil(lines / max(len(table.rows), 1))
            table = self.table(most=max(room // each, _FEWEST))
        done = sum(row.status in (DONE, FAILED) for row in self.rows.values())
        of = f" of {self.total}" if self.total else ""
        table.title = f"{done}{of} trials are done"
        return table

    def _remark(self, row: Row, best: bool) -> str:
        parts = ["best"] if best else []
        if row.status != DONE:
            parts.append(self._under_way(row))
        if row.parent:
            parts.append(f"from {row.parent}")
        promoted = [other.trial for other in self.rows.values() if other.parent == row.trial]
        return ", ".join([*parts, *(f"promoted: {trial}" for trial in promoted)])

    def _under_way(self, row: Row) -> str:
        if row.status == RUNNING and row.trial in self._now:
            run, _, share, _ = self._now[row.trial]
            which = f"run {run + 1} of {len(self._seeds)}, " if len(self._seeds) > 1 else ""
            return f"{which}{share:.0%} of an epoch"
        return row.status

    def _score_of(self, row: Row) -> str:
        if row.loss is not None:
            return f"{self._score.of_loss(row.loss):,.2f}"
        loss = self._now.get(row.trial, (0, 0, 0.0, math.inf))[3]
        under_way = row.status == RUNNING and math.isfinite(loss)
        return f"{self._score.of_loss(loss):,.2f}" if under_way else ""

    def _outcome(self, row: Row) -> str:
        if row.status == FAILED:
            return f"failed: {row.message}"
        return f"valid {self._score.name} {self._score_of(row)}"

    def _epochs_of(self, row: Row) -> str:
        done = row.epochs
        if done is None:
            done = self._now.get(row.trial, (0, 0, 0.0, 0.0))[1]
        return f"{done}/{row.budget}"

    def _time(self, row: Row) -> str:
        if row.seconds is not None:
            return duration_text(row.seconds)
        seconds = self.seconds(row.trial) if row.status == RUNNING else None
        return "" if seconds is None else duration_text(seconds)

    def _values(self, row: Row) -> str:
        return "  ".join(f"{name} {shown(row.values[key])}" for key, name in self._names.items())


def _number(row: Row) -> int:
    return int(row.trial)
