"""Rule for the per-example gradients of SimpleRNN layers."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd.gradients.recorded_pass import Call
from tfwd.gradients.rules.recurrent_common import sequence, sum_of_products
from tfwd.gradients.rules.registry import rule


@rule(keras.layers.SimpleRNN)
def simple_rnn(layer: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    """Computes `h = activation(x W + h U + b)`."""
    given = sequence(layer, keras.layers.SimpleRNNCell, *args, **kwargs)
    if given is None:
        return NotImplemented
    activation = layer.cell.activation or keras.activations.linear

    def step(z: tf.Tensor, r: tf.Tensor, states: list[tf.Tensor]) -> list[tf.Tensor]:
        return [activation(z + r)]

    return sum_of_products(layer, call, given, given.states, step)
