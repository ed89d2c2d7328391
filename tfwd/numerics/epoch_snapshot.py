"""Stores the state after the last epoch, for `FiniteCheck(action="restore")`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import wrapped_optimizers
from tfwd.numerics.bad_step_policy import BadStepPolicy
from tfwd.numerics.checked_step import tracked
from tfwd.numerics.leaf_optimizers import leaf_optimizers
from tfwd.numerics.non_finite_variables import non_finite_paths
from tfwd.numerics.python_counters import PythonCounters


class EpochSnapshot:
    """Snapshot of all variables of a model and its optimizers between two epochs, without metrics.

    The snapshot is taken just before the first step of the next epoch. All callbacks have then put
    the trained weights back, in any order of the callbacks. `SwapEMAWeights` exchanges them with
    averages for the end of an epoch.

    Args:
        model: the compiled model.
        policy: the policy that stores the values and restores them.
        selects: function that returns False for the path of a weight that may be non-finite.

    Raises:
        ValueError: If a learning rate is a schedule, which cannot be multiplied.
    """

    def __init__(self, model: keras.Model, policy: BadStepPolicy, selects: Callable[[str], bool]):
        self._model, self._policy, self._selects = model, policy, selects
        self._rates: list[tuple[Any, float]] = []  # optimizers with their rates in the snapshot
        self._counters = PythonCounters([])
        self._next_rates: list[tuple[Any, float]] | None = None  # if an epoch has ended
        for leaf in self._leaves():
            if not wrapped_optimizers.has_fixed_rate(leaf):
                raise ValueError(
                    "FiniteCheck(action='restore') lowers the learning rate, but the "
                    f"learning rate of {type(leaf).__name__} '{wrapped_optimizers.name(leaf)}' is "
                    "a schedule: give the optimizer a number, or use action='skip'"
                )

    def end_epoch(self) -> None:
        """Stores the learning rates of the epoch. The next step takes a snapshot."""
        self._next_rates = [(x, wrapped_optimizers.initial_rate(x)) for x in self._leaves()]

    def begin_step(self) -> None:
        """Takes a snapshot before the first step after `end_epoch`, if the variables are finite.

        An unchecked step may have made them non-finite. The previous snapshot is then kept.
        """
        rates, self._next_rates = self._next_rates, None
        if rates is None or non_finite_paths(self._model, self._selects, states=False):
            return
        metrics = {
            id(_keras.variables.tf_variable(variable))
            for metric in self._model.metrics
            for variable in metric.variables
        }
        self._policy.store(v for v in tracked(self._model) if id(v) not in metrics)
        self._rates, self._counters = rates, PythonCounters(leaf_optimizers(self._model))

    def restore(self) -> str:
        """Restores the snapshot, and lowers the learning rates. Returns the rates as text.

        A rate that another callback lowered after the snapshot is multiplied, not the stored one.
        """
        before = [wrapped_optimizers.initial_rate(leaf) for leaf, _ in self._rates]
        factor = self._policy.leave_behind()
        self._counters.restore()
        for (leaf, stored), rate in zip(self._rates, before, strict=True):
            lower = stored * factor
            if math.isfinite(rate):  # it includes the factors of earlier restores
                lower = min(stored, rate) * self._policy.factor
            leaf.learning_rate = lower
        return ", ".join(f"{_rate(leaf):.4g}" for leaf, _ in self._rates)

    def _leaves(self) -> list[Any]:
        leaves = leaf_optimizers(self._model)
        return [leaf for leaf in leaves if wrapped_optimizers.has_learning_rate(leaf)]


def _rate(leaf: Any) -> float:
    return float(tf.convert_to_tensor(wrapped_optimizers.learning_rate(leaf)))
