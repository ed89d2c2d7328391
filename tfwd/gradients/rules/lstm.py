"""Rule for the per-example gradients of LSTM layers."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd.gradients.recorded_pass import Call
from tfwd.gradients.rules.recurrent_common import sequence, sum_of_products
from tfwd.gradients.rules.registry import rule


@rule(keras.layers.LSTM)
def lstm(layer: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    """Computes an LSTM with gates in the order i, f, c, o of `x W + h U + b`."""
    given = sequence(layer, keras.layers.LSTMCell, *args, **kwargs)
    if given is None:
        return NotImplemented
    activation, gate = layer.cell.activation, layer.cell.recurrent_activation

    def step(z: tf.Tensor, r: tf.Tensor, states: list[tf.Tensor]) -> list[tf.Tensor]:
        i, f, new, o = tf.split(z + r, 4, axis=1)
        c = gate(f) * states[1] + gate(i) * activation(new)
        return [gate(o) * activation(c), c]

    return sum_of_products(layer, call, given, given.states, step)
