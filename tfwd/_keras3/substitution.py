"""Substitutes tensors for reads of variables on Keras 3, and intercepts assignments."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd._keras_shared.scopes import Scope


class Substitution(Scope, keras.StatelessScope):
    """A `Scope` that Keras asks at each read of a variable and informs of each update.

    `keras.StatelessScope` itself captures every update inside it.

    Args:
        values: Pairs of a variable and its substitute.
        capture: bool. Stores updates in `updates` and does not make them.

    Attributes:
        losses: Losses that layers added inside the scope.
    """

    def __init__(self, values: list[tuple[keras.Variable, tf.Tensor]], capture: bool) -> None:
        super().__init__(collect_losses=True)
        # The constructor converts each tensor. That costs an op if the static shape is known, and
        # fails if it is not. So the values are set here.
        self._begin(values, capture)

    @staticmethod
    def _make(variable: keras.Variable, value: Any) -> None:
        variable._direct_assign(value)
