"""How much an update decays: `weight_decay` times its scale."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import updates as _keras_updates
from tfwd._keras import wrapped_optimizers

SCALES = ("absolute", "learning_rate", "schedule")


class DecayRate:
    """d * s, where d is `weight_decay` and s what `scale` says.

    Args:
        owner: whose it is, for error messages.
        weight_decay: a number, a schedule, a function without arguments, or a scalar variable.
        scale: one of `SCALES`.

    Raises:
        TypeError: weight_decay is of another kind.
        ValueError: weight_decay is negative or not finite, or there is no such scale.
    """

    def __init__(self, owner: str, weight_decay: Any, scale: str) -> None:
        variable = isinstance(weight_decay, tf.Variable) or _keras.variables.is_variable(
            weight_decay
        )
        number = isinstance(weight_decay, numbers.Real) and not isinstance(weight_decay, bool)
        if not (variable or number or callable(weight_decay)):
            raise TypeError(
                f"{owner}: weight_decay={weight_decay!r}: give a number, a schedule, a function "
                "without arguments, or a scalar variable"
            )
        if variable and (tuple(weight_decay.shape) or "float" not in str(weight_decay.dtype)):
            raise ValueError(
                f"{owner}: weight_decay is a variable of shape {tuple(weight_decay.shape)} and "
                f"dtype {tf.as_dtype(weight_decay.dtype).name}: give a scalar of a floating dtype"
            )
        if number and not 0 <= weight_decay < math.inf:
            raise ValueError(f"{owner}: weight_decay={weight_decay}: give a finite number, >= 0")
        weight_decay = float(weight_decay) if number else weight_decay
        if scale not in SCALES:
            raise ValueError(f"{owner}: scale={scale!r}: give one of {', '.join(SCALES)}")
        self.owner, self.weight_decay, self.scale = owner, weight_decay, scale
        self.is_zero = number and weight_decay == 0
        self._is_constant, self._is_variable = number, variable
        self.initial: list[float] = []

    def check_share(self, multiplier: float) -> None:
        """Raises a ValueError if an update would take away all of a weight, or more."""
        if self.scale != "absolute" or not self._is_constant:
            return
        if self.weight_decay * multiplier >= 1:
            times = "" if multiplier == 1 else f" times the multiplier {multiplier:g}"
            raise ValueError(
                f"{self.owner}: weight_decay={self.weight_decay}{times}: with scale='absolute' "
                "each update takes this share of a weight away, so it must be below 1; "
                "scale='learning_rate' is PyTorch's and Keras's meaning"
            )

    def note_initial(self, leaves: Sequence[Any]) -> None:
        """Keeps the initial learning rates of those optimizers that were not known before.

        Raises:
            ValueError: the scale divides by one that is 0, or there is none.
        """
        for leaf in leaves:
            if self.scale != "absolute" and not wrapped_optimizers.has_learning_rate(leaf):
                raise ValueError(
                    f"{self.owner}: scale={self.scale!r} multiplies by the learning rate, and "
                    f"{type(leaf).__name__} '{wrapped_optimizers.name(leaf)}' has none; take "
                    "scale='absolute'"
                )
        if self.scale != "schedule":
            return
        for leaf in leaves[len(self.initial) :]:
            with tf.init_scope():  # one can be met first while a step is traced
                initial = wrapped_optimizers.initial_rate(leaf)
            if initial <= 0:
                named = f"{type(leaf).__name__} '{wrapped_optimizers.name(leaf)}'"
                raise ValueError(
                    f"{self.owner}: scale='schedule' divides by the initial learning rate, and "
                    f"that of {named} is {initial}; take "
                    "scale='learning_rate' and divide weight_decay by the largest rate"
                )
            self.initial = [*self.initial, initial]

    def __call__(
        self, leaf: Any, leaves: Sequence[Any], learning_rate: Any, dtype: tf.DType
    ) -> tf.Tensor:
        """d * s of an update that is made now, a scalar.

        Args:
            leaf: the optimizer that makes it.
            leaves: all optimizers that make updates, in the order of `note_initial`.
            learning_rate: the update's.
            dtype: of the result.
        """
        decay = self.weight_decay
        if isinstance(decay, keras.optimizers.schedules.LearningRateSchedule):
            decay = decay(_keras_updates.schedule_step(leaf))
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
        """The arguments, and the initial rates: an optimizer's own config has the current one."""
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
