"""`Watcher`: base class of the objects that display the trials of a search."""

from __future__ import annotations

import abc
import os
import time
from collections.abc import Callable

from keras_tuner.engine.trial import Trial

from tfwd.tuning.stopwatch import spent


class Watcher(abc.ABC):
    """Observer of the trials: all trials in the chief or a single process, own trials in a worker.

    Args:
        folder: function from a trial's number to its folder. The folder has the time of the trial's
            earlier runs, and the reason of a failure in another process.
        clock: function that returns the time in seconds. Tests replace it.
    """

    def __init__(
        self,
        folder: Callable[[str], str | os.PathLike[str]],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._trial_folder, self._clock = folder, clock
        self._began: dict[str, float] = {}

    @abc.abstractmethod
    def line(self, text: str) -> None:
        """Prints a line."""

    def began(self, trial: Trial) -> None:
        """Notes that a worker started or resumed a trial."""
        before = spent(self._trial_folder(trial.trial_id))
        self._began[trial.trial_id] = self._clock() - before

    @abc.abstractmethod
    def ended(self, trial: Trial) -> None:
        """Shows the result of a trial that ended, successfully or not."""

    def lost(self, trial: Trial, worker: str) -> None:
        """Prints that a worker was silent for too long, and that its trial waits for another."""
        self.line(f"{worker} is silent: trial {trial.trial_id} waits for another worker")

    def seconds(self, trial_id: str) -> float | None:
        """Returns the time of a trial until now, or `None` if it did not begin here."""
        began = self._began.get(trial_id)
        return None if began is None else self._clock() - began
