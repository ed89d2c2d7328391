"""Policy for bad steps: stop, skip the step, or restore the end of the last epoch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfwd._graph.tentative_assignments import replica_parts
from tfwd.numerics.bad_step_report import Report
from tfwd.numerics.checked_step import assign_all


class BadStepPolicy:
    """Policy for bad steps, with the values to restore.

    Args:
        action: "raise", "skip" or "restore".
        max_consecutive: int. The number of consecutive bad steps to skip; for "restore", of bad
            steps from which the same epoch is restored.
        factor: float. The factor of the learning rate, for each restore of the same epoch.

    Attributes:
        factor: float. As in the arguments.
        failures: int. The number of bad steps since the last good step; for "restore", since the
            end of the last epoch.
    """

    def __init__(self, action: str, max_consecutive: int, factor: float):
        self.action = action
        self._max_consecutive, self.factor = max_consecutive, factor
        self._values: list[tuple[tf.Variable, Any]] | None = None
        self.failures = 0

    def good_step(self) -> None:
        """Resets `failures` after a good step. With "restore", only `store` resets it."""
        if self.action != "restore":
            self.failures = 0

    def store(self, variables: Iterable[tf.Variable]) -> None:
        """Stores the values of variables at the end of an epoch, for "restore".

        Each replica has values of its own, such as the moving mean of a `BatchNormalization`.
        """
        parts = [part for variable in variables for part in replica_parts(variable)]
        self._values = [(part, part.numpy()) for part in parts]
        self.failures = 0

    def reason_to_stop(self) -> str | None:
        """Returns the reason why a bad step ends the training.

        Returns:
            A text; "" if every bad step ends the training; `None` if this bad step does not.
        """
        if self.action == "raise":
            return ""
        if self.failures >= self._max_consecutive:
            effect = "consecutive bad steps were skipped"
            if self.action == "restore":
                effect = "bad steps led to a restore of the same epoch"
            return f"before this step, {self.failures} {effect}" if self.failures else ""
        if self.action == "restore" and self._values is None:
            return "no epoch of this run has ended with finite weights, so no state can be restored"
        return None

    def leave_behind(self) -> float:
        """Counts a bad step, and restores the stored values for "restore".

        Returns:
            The factor for the stored learning rate.
        """
        self.failures += 1
        if self.action != "restore":
            return 1.0
        assign_all(self._values or ())
        return self.factor**self.failures


def restored(rates: str) -> str:
    """Returns a text about a restored epoch.

    Args:
        rates: the new learning rates.
    """
    return f"restored the end of the last epoch with finite weights, at learning rate {rates}"


def repeated_failure_hint(reports: Sequence[Report], skipped: int) -> str:
    """Returns a hint that skipping more steps does not help, if the last reports agree.

    A skipped step changes no weight. A cause that every batch has therefore remains.

    Args:
        reports: the reports of all bad steps.
        skipped: int. The number of bad steps just before the last one.

    Returns:
        A sentence; "" if the reports name different positions.
    """
    last = reports[-skipped - 1 :]
    where = last[-1].where
    if skipped < 1 or any(report.where != where for report in last):
        return ""
    began = f"In each of these steps, NaN or infinity began in {where}"
    if where.startswith("data "):
        return f"{began}: check whether all batches are bad, and repair the data."
    return f"{began}: a skipped step changes no weight, so skipping more steps does not help."
