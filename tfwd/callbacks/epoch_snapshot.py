"""Snapshot of a training at the end of its last epoch, for a restore."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import training as _keras_training
from tfwd._keras import wrapped_optimizers
from tfwd.numerics.checked_step import not_finite, tracked


class EpochSnapshot:
    """Snapshot of all variables of a model and its optimizers at an epoch's end, without metrics.

    Args:
        model: the compiled model.
        factor: float. The factor of the learning rates, for each restore of the same epoch.

    Attributes:
        exists: bool. True if there is a snapshot.
        restores: int. The number of restores of the present snapshot.

    Raises:
        ValueError: a learning rate is a schedule, which cannot be multiplied.
    """

    def __init__(self, model: keras.Model, factor: float):
        self._model, self._factor = model, factor
        self._values: list[tuple[tf.Variable, Any]] = []
        self._rates: list[tuple[Any, float]] = []  # optimizers with their learning rates
        self.exists, self.restores = False, 0
        for leaf in self._leaves():
            if not wrapped_optimizers.has_fixed_rate(leaf):
                raise ValueError(
                    "FiniteCheck(action='restore') lowers the learning rate, but the "
                    f"learning rate of {type(leaf).__name__} '{wrapped_optimizers.name(leaf)}' is "
                    "a schedule: give the optimizer a number, or use action='skip'"
                )

    def take(self) -> None:
        """Takes a snapshot, if the weights and the optimizers' variables are finite.

        An unchecked step may have made them non-finite. Then the previous snapshot stays.
        """
        if not_finite(self._model):
            return
        metrics = {
            id(_keras.variables.tf_variable(variable))
            for metric in self._model.metrics
            for variable in metric.variables
        }
        variables = [v for v in tracked(self._model) if id(v) not in metrics]
        self._values = [(variable, variable.numpy()) for variable in variables]
        self._rates = [(leaf, _rate(leaf)) for leaf in self._leaves()]
        self.exists, self.restores = True, 0

    def restore(self) -> str:
        """Restores the snapshot. Returns the learning rates as text."""
        self.restores += 1
        for variable, value in self._values:
            variable.assign(value)
        for leaf, rate in self._rates:
            leaf.learning_rate = rate * self._factor**self.restores
        return ", ".join(f"{_rate(leaf):.4g}" for leaf, _ in self._rates)

    def _leaves(self) -> list[Any]:
        optimizers = _keras_training.optimizers(self._model)
        leaves = [leaf for optimizer in optimizers for leaf in wrapped_optimizers.leaves(optimizer)]
        return [leaf for leaf in leaves if wrapped_optimizers.has_learning_rate(leaf)]


def _rate(leaf: Any) -> float:
    return float(tf.convert_to_tensor(wrapped_optimizers.learning_rate(leaf)))
