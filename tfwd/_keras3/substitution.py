"""Maps variable reads to tensors on Keras 3, and intercepts assignments."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd._keras_shared.scopes import Scope


class Substitution(Scope, keras.StatelessScope):
    """A `Scope` that Keras asks at each read of a variable and tells of each update.

    `keras.StatelessScope` by itself captures every update that is made inside it.

    Args:
        values: pairs of a variable and the tensor to be read in its place.
        capture: whether updates are kept in `updates` and not made.

    Attributes:
        losses: the losses that layers added inside the scope.
    """

    def __init__(self, values: list[tuple[keras.Variable, tf.Tensor]], capture: bool) -> None:
        super().__init__(collect_losses=True)
        # Not through the constructor: it converts each tensor, which costs an op where the static
        # shape is known and an error where it is not.
        self._begin(values, capture)

    @staticmethod
    def _make(variable: keras.Variable, value: Any) -> None:
        variable._direct_assign(value)
