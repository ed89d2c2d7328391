"""Stores the state at the end of the last epoch, for `FiniteCheck(action="restore")`."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import training as _keras_training
from tfwd._keras import wrapped_optimizers
from tfwd.numerics.bad_step_policy import BadStepPolicy
from tfwd.numerics.checked_step import not_finite, tracked
from tfwd.numerics.leaf_optimizers import leaf_optimizers


class EpochSnapshot:
    """Snapshot of all variables of a model and its optimizers at an epoch's end, without metrics.

    Args:
        model: the compiled model.
        policy: the policy that stores the values and restores them.

    Raises:
        ValueError: If a learning rate is a schedule, which cannot be multiplied.
    """

    def __init__(self, model: keras.Model, policy: BadStepPolicy):
        self._model, self._policy = model, policy
        self._rates: list[tuple[Any, float]] = []  # optimizers with their learning rates
        for leaf in self._leaves():
            if not wrapped_optimizers.has_fixed_rate(leaf):
                raise ValueError(
                    "FiniteCheck(action='restore') lowers the learning rate, but the "
                    f"learning rate of {type(leaf).__name__} '{wrapped_optimizers.name(leaf)}' is "
                    "a schedule: give the optimizer a number, or use action='skip'"
                )

    def take(self) -> None:
        """Takes a snapshot, if the weights and the optimizers' variables are finite.

        An unchecked step may have made them non-finite. The previous snapshot is then kept.
        """
        if not_finite(self._model):
            return
        metrics = {
            id(_keras.variables.tf_variable(variable))
            for metric in self._model.metrics
            for variable in metric.variables
        }
        self._policy.store(v for v in tracked(self._model) if id(v) not in metrics)
        self._rates = [(x, wrapped_optimizers.initial_rate(x)) for x in self._leaves()]

    def restore(self) -> str:
        """Restores the snapshot, and lowers the learning rates. Returns the rates as text.

        A rate that another callback lowered after the snapshot is multiplied, not the stored one.
        """
        before = [wrapped_optimizers.initial_rate(leaf) for leaf, _ in self._rates]
        factor = self._policy.leave_behind()
        for optimizer in _keras_training.optimizers(self._model):
            for one in wrapped_optimizers.chain(optimizer):
                # At the end of an epoch, the averages of NonMonotonicASGD may be in the model.
                if getattr(one, "exchanged", False):
                    one.exchange()
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
