"""Makes one run of a trial: a training run in its own folder, with the program's trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import keras
import ml_collections
from rich.console import Console

from tfwd.runs.interfaces import Data, Score
from tfwd.runs.program_base import Program
from tfwd.runs.storage.run_folder import RunFolder
from tfwd.runs.training.display import Display
from tfwd.runs.training.stop_signals import StopRequest
from tfwd.runs.workers.worker_group import Workers
from tfwd.tuning.parent_run_copy import copy_parent_run
from tfwd.tuning.stopwatch import Stopwatch

# Arguments: finished epochs, share of the current epoch, best loss so far (infinite at first).
Report = Callable[[int, float, float], None]


class Result(NamedTuple):
    """Result of a run: the best validation loss, its epochs, and the seconds of all its parts."""

    loss: float
    epochs: int
    seconds: float


def run(
    program: Program,
    config: ml_collections.ConfigDict,
    data: Data,
    folder: Path,
    stop: StopRequest,
    report: Report = lambda epochs, share, loss: None,
) -> Result:
    """Trains until `config.training.epochs`, and resumes from the folder's last checkpoint.

    Args:
        program: the program to train.
        config: the trial's configuration, with the run's seed.
        data: the data to train on.
        folder: path of the run folder.
        stop: the stop request, checked after every step.
        report: function that is called with the progress.

    Raises:
        Stopped: a signal arrived; a checkpoint was saved.
        UserError: training failed, or a file cannot be written.
    """
    watch = Stopwatch(folder)
    keras.utils.set_random_seed(config.seed)
    run_folder = RunFolder(folder, program)
    run_folder.open(config, data.vocabulary)
    try:
        with open(folder / "log.txt", "a", encoding="utf-8") as log:
            display = _TrialDisplay(program.score, log)
            with program.make_trainer(
                config, data, run_folder, display, stop, Workers()
            ) as trainer:
                progress = trainer.progress

                def report_share(share: float) -> None:
                    watch.tick()
                    report(progress.epoch, share, progress.best_loss)

                display.report_share = report_share
                trainer.train()
                return Result(progress.best_loss, progress.epoch, watch.seconds)
    finally:
        with contextlib.suppress(OSError):  # a full disk has been reported already
            watch.save()
        run_folder.close()


def promote(parent: Path, folder: Path) -> None:
    """Starts a run from the end of another run, with its checkpoints, best weights and metrics.

    The checkpoint has the whole state: weights, optimizer (moments, averages), learning rate, the
    counters of the draws, and the position in the data. The promoted run therefore equals, bit for
    bit, a single run over all these epochs.
    """
    copy_parent_run(parent, folder, ".lock", "events.out.*")


class _TrialDisplay(Display):
    """Display of a training run in its `log.txt`, which also reports the progress."""

    def __init__(self, score: Score, log: IO[str]):
        super().__init__(score, Console(file=log, width=120), seconds=30.0)
        self.report_share: Callable[[float], None] = lambda share: None
        self._total = 1

    def epoch(self, title: str, windows: int, done: int) -> None:
        self._total = max(windows, 1)
        super().epoch(title, windows, done)

    def window(self, done: int, *facts: Any, **named: Any) -> None:
        super().window(done, *facts, **named)
        self.report_share(done / self._total)
