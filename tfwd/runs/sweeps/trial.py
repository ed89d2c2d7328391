"""One run of a trial: a training run in a folder of its own, by the program's trainer."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import keras
import ml_collections
from rich.console import Console

from tfwd.runs.interfaces import Data, Score
from tfwd.runs.program import Program
from tfwd.runs.storage.folder import RunFolder
from tfwd.runs.training.display import Display
from tfwd.runs.training.signals import StopRequest
from tfwd.tuning import stopwatch
from tfwd.tuning.stopwatch import Stopwatch

# Called in a run: finished epochs, share of the one under way, best loss so far (first infinite).
Report = Callable[[int, float, float], None]


class Result(NamedTuple):
    """What came of a run: the best validation loss, its epochs, the seconds of all its parts."""

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
    """Trains to the end of `config.training.epochs`; goes on with what the folder holds.

    Args:
        program: what is trained.
        config: the trial's configuration, with the run's seed.
        data: what it is trained on.
        folder: of the run.
        stop: looked at after every window.
        report: told of the progress.

    Raises:
        Stopped: a signal came; a checkpoint was saved.
        UserError: training failed, or a file cannot be written.
    """
    watch = Stopwatch(folder)
    keras.utils.set_random_seed(config.seed)
    run_folder = RunFolder(folder, program)
    run_folder.open(config, data.vocabulary)
    try:
        with open(folder / "log.txt", "a", encoding="utf-8") as log:
            display = _TrialDisplay(program.score, log)
            with program.make_trainer(config, data, run_folder, display, stop) as trainer:
                progress = trainer.progress

                def tell(share: float) -> None:
                    watch.tick()
                    report(progress.epoch, share, progress.best_loss)

                display.tell = tell
                trainer.train()
                return Result(progress.best_loss, progress.epoch, watch.seconds)
    finally:
        with contextlib.suppress(OSError):  # a full disk has been reported already
            watch.save()
        run_folder.close()


def promote(parent: Path, folder: Path) -> None:
    """Begins a run where another ended: with its checkpoints, best weights and log.

    All of the state is in the checkpoint: weights, optimizer (moments, averages), learning rate,
    the numbers of the next draws, and the place in the text. So a promoted run is, bit for bit, the
    run that would have been trained for so many epochs at once.
    """
    if folder.exists():  # it has begun before, and was stopped
        return
    copied = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(copied, ignore_errors=True)
    own = (".lock", "events.out.*", stopwatch.FILE)  # of the parent, and stays there
    shutil.copytree(parent, copied, ignore=shutil.ignore_patterns(*own))
    copied.rename(folder)


class _TrialDisplay(Display):
    """Writes what training would show to the run's `log.txt`, and tells how far it is."""

    def __init__(self, score: Score, log: IO[str]):
        super().__init__(score, Console(file=log, width=120), seconds=30.0)
        self.tell: Callable[[float], None] = lambda share: None
        self._total = 1

    def epoch(self, title: str, windows: int, done: int) -> None:
        self._total = max(windows, 1)
        super().epoch(title, windows, done)

    def window(self, done: int, *facts: Any, **named: Any) -> None:
        super().window(done, *facts, **named)
        self.tell(done / self._total)
