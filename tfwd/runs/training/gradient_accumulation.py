"""Accumulates the gradients of several steps for one update: `optimizer.steps_per_update`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfwd import _keras


class GatheredGradients:
    """Sums of the gradients and learning rates since the last update.

    Checkpoints do not contain the sums. They are saved after updates, when the sums are zero.

    Args:
        variables: the trained weights.
    """

    def __init__(self, variables: Sequence[Any]):
        weights = [_keras.variables.tf_variable(variable) for variable in variables]
        self._sums = [tf.Variable(tf.zeros_like(w), trainable=False) for w in weights]
        self._rates = tf.Variable([0.0, 0.0], trainable=False)  # the sum, and the number

    def add(self, gradients: Sequence[Any], rate: tf.Tensor) -> None:
        """Adds the gradients and the rate of a step."""
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total.assign_add(gradient)
        self._rates.assign_add([rate, 1.0])

    def means(self, gradients: Sequence[Any], rate: tf.Tensor) -> tuple[list[Any], tf.Tensor]:
        """Returns the mean gradients and the mean rate, including the current step."""
        count = self._rates[1] + 1.0
        means = [
            None if gradient is None else (total + gradient) / tf.cast(count, total.dtype)
            for total, gradient in zip(self._sums, gradients, strict=True)
        ]
        return means, (self._rates[0] + rate) / count

    def forget(self) -> None:
        """Sets the sums to zero, after an update or a skipped step."""
        for variable in [*self._sums, self._rates]:
            variable.assign(tf.zeros_like(variable))
