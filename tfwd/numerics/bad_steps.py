"""Policy for bad steps: stop, skip the step, or restore the end of the last epoch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


class BadStepPolicy:
    """Decides what follows a bad step, and stores the values that are restored.

    Args:
        action: "raise", "skip" or "restore".
        max_consecutive: int. The number of consecutive bad steps to skip or restore from.
        factor: float. The factor of the learning rate, for each restore of the same epoch.

    Attributes:
        failures: int. The number of bad steps since the last good step; for "restore", since the
            end of the last epoch.
    """

    def __init__(self, action: str, max_consecutive: int, factor: float):
        self.action = action
        self._max_consecutive, self._factor = max_consecutive, factor
        self._values: list[tuple[tf.Variable, Any]] | None = None
        self.failures = 0

    def good_step(self) -> None:
        """Notes a good step. For "restore" only a finished epoch counts: see `store`."""
        if self.action != "restore":
            self.failures = 0

    def store(self, variables: Iterable[tf.Variable]) -> None:
        """Stores the values of variables at the end of an epoch, for "restore"."""
        self._values = [(variable, variable.numpy()) for variable in variables]
        self.failures = 0

    def reason_to_stop(self) -> str | None:
        """Returns why a bad step ends the training; "" if it always does, `None` if it does not."""
        if self.action == "raise":
            return ""
        if self.failures >= self._max_consecutive:
            tried = "skipped" if self.action == "skip" else "restored from"
            count = self.failures
            return f"{count} consecutive bad steps were {tried} before it" if count else ""
        if self.action == "restore" and self._values is None:
            return "there is no finished epoch yet to restore"
        return None

    def leave_behind(self) -> float:
        """Counts a bad step, and restores the stored values for "restore".

        Returns:
            The factor of the stored learning rate.
        """
        self.failures += 1
        if self.action != "restore":
            return 1.0
        for variable, value in self._values or ():
            variable.assign(value)
        return self._factor**self.failures


def restored(rates: str) -> str:
    """Returns what was done, in words.

    Args:
        rates: the new learning rates.
    """
    return f"restored the end of the last epoch, with the learning rate {rates}"
