"""Tensors in place of the values of a layer's variables, on Keras 3."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd._keras_shared.substitution_scopes import Scope


class Substitution(Scope, keras.StatelessScope):
    """A `Scope` that Keras calls at each read and at each update of a variable.

    `keras.StatelessScope` itself captures every update inside it.

    Args:
        values: Pairs of a variable and its substitute.
        capture: bool. Stores updates in `updates` and does not make them.

    Attributes:
        losses: Losses that layers added inside the scope.
    """

    def __init__(self, values: list[tuple[keras.Variable, tf.Tensor]], capture: bool) -> None:
        super().__init__(collect_losses=True)
        # The constructor would convert each tensor. A conversion costs an op, and fails if the
        # static shape is unknown. So the values are set here.
        self._begin(values, capture)

    @staticmethod
    def _make(variable: keras.Variable, value: Any) -> None:
        variable._direct_assign(value)
