"""Votes of the workers, so that all workers stop and save after the same step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tfwd.runs.training.stop_signals import StopRequest
from tfwd.runs.workers.worker_group import Workers


class Votes:
    """Votes on two questions: must the run stop, and is a checkpoint due?

    A worker casts its vote before a step. The step sums the votes with the gradients. A single
    process decides by itself, and may stop after the current step.

    Args:
        workers: the `Workers` that train together.
        stop: the stop request of this process. It also receives the signals of other workers.
        is_due: function of a step's number. Returns True if a checkpoint is due after this step.
            Only the chief's vote counts.
    """

    def __init__(self, workers: Workers, stop: StopRequest, is_due: Callable[[int], bool]):
        self._workers, self._stop, self._is_due = workers, stop, is_due

    def cast(self, step: int) -> None:
        """Casts the vote of this worker, before the step with number `step`."""
        if self._workers.count > 1:
            due = self._workers.is_chief and self._is_due(step)
            self._workers.vote.assign([*self._signal(), float(due)])

    def stops(self) -> bool:
        """Returns True if the run must stop after the last step."""
        if self._workers.count > 1:  # a signal after the vote counts in the next step
            self._take(self._workers.votes.numpy()[:-1])
            return bool(self._workers.votes.numpy()[:-1].any())
        return bool(self._stop)

    def saves(self, step: int) -> bool:
        """Returns True if a checkpoint is due after `step`, the number of the last step."""
        if self._workers.count > 1:
            return bool(self._workers.votes.numpy()[-1])
        return self._is_due(step)

    def agree_on_stop(self) -> None:
        """Requests a stop here if any worker got a signal. All workers must call this method."""
        self._take(self._workers.total(self._signal()))

    def _signal(self) -> np.ndarray:
        """Returns zeros, with the number of this worker's signal at the worker's position."""
        vote = np.zeros(self._workers.count)
        vote[self._workers.index] = self._stop.number or 0
        return vote

    def _take(self, signals: np.ndarray) -> None:
        if signals.any() and not self._stop:
            self._stop.number = int(signals[signals > 0][0])
