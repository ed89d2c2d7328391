"""The amount of decay per update: `weight_decay` times its scale."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import update_interception, wrapped_optimizers

SCALES = ("absolute", "learning_rate", "schedule")


class DecayRate:
    """The decay rate d * s. d is `weight_decay`, and `scale` selects s.

    Args:
        owner: Name of the optimizer, for error messages.
        weight_decay: float, schedule, function without arguments, or scalar variable.
        scale: One of `SCALES`.

    Raises:
        TypeError: If weight_decay has another type.
        ValueError: If weight_decay is negative or not finite, or if the scale is unknown.
    """

    def __init__(self, owner: str, weight_decay: Any, scale: str) -> None:
        variable = isinstance(weight_decay, tf.Variable) or _keras.variables.is_variable(
            weight_decay
        )
        number = isinstance(weight_decay, numbers.Real) and not isinstance(weight_decay, bool)
        if not (variable or number or callable(weight_decay)):
            raise TypeError(
                f"{owner}: weight_decay={weight_decay!r}: expected a number, a schedule, a "
                "function without arguments, or a scalar variable"
            )
        if variable and (tuple(weight_decay.shape) or "float" not in str(weight_decay.dtype)):
            raise ValueError(
                f"{owner}: weight_decay is a variable of shape {tuple(weight_decay.shape)} and "
                f"dtype {tf.as_dtype(weight_decay.dtype).name}: expected a scalar of a floating "
                "dtype"
            )
        if number and not 0 <= weight_decay < math.inf:
            raise ValueError(
                f"{owner}: weight_decay={weight_decay}: expected a finite number of at least 0"
            )
        weight_decay = float(weight_decay) if number else weight_decay
        if scale not in SCALES:
            raise ValueError(f"{owner}: scale={scale!r}: expected one of {', '.join(SCALES)}")
        self.owner, self.weight_decay, self.scale = owner, weight_decay, scale
        self.is_zero = number and weight_decay == 0
        self._is_constant, self._is_variable = number, variable
        self.initial: list[float] = []

    def check_removed_fraction(self, multiplier: float) -> None:
        """Raises a ValueError if one update would remove 100 % of a weight, or more."""
        if self.scale != "absolute" or not self._is_constant:
            return
        if self.weight_decay * multiplier >= 1:
            times = "" if multiplier == 1 else f" times the multiplier {multiplier:g}"
            raise ValueError(
                f"{self.owner}: weight_decay={self.weight_decay}{times}: with scale='absolute' "
                "each update removes this fraction of a weight, so it must be below 1. Pass a "
                "smaller value, or use scale='learning_rate' as PyTorch and Keras do"
            )

    def store_initial_rates(self, leaves: Sequence[Any]) -> None:
        """Stores the initial learning rate of each new optimizer.

        Raises:
            ValueError: If the scale needs a learning rate and an optimizer has none. If the scale
                is "schedule" and an initial learning rate is not positive.
        """
        for leaf in leaves:
            if self.scale != "absolute" and not wrapped_optimizers.has_learning_rate(leaf):
                raise ValueError(
                    f"{self.owner}: scale={self.scale!r} multiplies by the learning rate, but "
                    f"{type(leaf).__name__} '{wrapped_optimizers.name(leaf)}' has no learning "
                    "rate: use scale='absolute'"
                )
        if self.scale != "schedule":
            return
        for leaf in leaves[len(self.initial) :]:
            with tf.init_scope():  # a traced step may be the first to see an optimizer
                initial = wrapped_optimizers.initial_rate(leaf)
            if initial <= 0:
                named = f"{type(leaf).__name__} '{wrapped_optimizers.name(leaf)}'"
                raise ValueError(
                    f"{self.owner}: scale='schedule' divides by the initial learning rate, but "
                    f"the initial learning rate of {named} is {initial}: use "
                    "scale='learning_rate', and divide weight_decay by the largest learning rate"
                )
            self.initial = [*self.initial, initial]

    def __call__(
        self, leaf: Any, leaves: Sequence[Any], learning_rate: Any, dtype: tf.DType
    ) -> tf.Tensor:
        """Returns d * s for the current update, as a scalar.

        Args:
            leaf: Optimizer that makes the update.
            leaves: All optimizers that make updates, in the order of `store_initial_rates`.
            learning_rate: Learning rate of the update.
            dtype: dtype of the result.
        """
        decay = self.weight_decay
        if isinstance(decay, keras.optimizers.schedules.LearningRateSchedule):
            decay = decay(update_interception.schedule_step(leaf))
        elif not (self._is_constant or self._is_variable):
            decay = decay()
        decay = _scalar(decay, dtype)
        if self.scale == "absolute":
            return decay
        rate = _scalar(learning_rate, dtype)
        if self.scale == "schedule":
            index = next(i for i, known in enumerate(leaves) if known is leaf)
            rate = rate / self.initial[index]
        return decay * rate

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments and the initial rates. The wrapped config has the current rates."""
        decay = self.weight_decay
        if self._is_variable:
            decay = float(decay.numpy())
        elif not self._is_constant:
            decay = keras.saving.serialize_keras_object(decay)
        config = {"weight_decay": decay, "scale": self.scale}
        if self.scale == "schedule":
            config["initial_rates"] = list(self.initial)
        return config


def _scalar(value: Any, dtype: tf.DType) -> tf.Tensor:
    if isinstance(value, (int, float)):
        return tf.constant(value, dtype)
    return tf.cast(_keras.ops.convert_to_tensor(value), dtype)
