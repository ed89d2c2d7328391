"""Runs a recurrent layer of Keras 3 with another loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

# A loop takes inputs, first states and mask. It returns last output, all outputs and last states.
Loop = Callable[[tf.Tensor, Any, Any], tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]]


def has_plain_loop(layer: Any) -> bool:
    """Returns True if a layer of Keras's class has the usual loop, neither cuDNN's nor unrolled."""
    return (
        layer.cell.autocast
        and not layer.unroll
        and layer.use_cudnn is not True  # True is an error without a GPU
    )


def call_with_loop(
    layer: Any,
    gates: int,
    loop: Loop,
    sequences: tf.Tensor,
    initial_state: Any,
    mask: Any,
    training: bool,
) -> Any:
    """Runs the layer's call with another loop: states, dropout of the inputs, outputs."""
    return keras.layers.RNN.call(
        _OtherLoop(layer, loop),
        sequences,
        initial_state=initial_state,
        mask=mask,
        training=training,
    )


class _OtherLoop:
    """The layer, except for its `inner_loop`."""

    def __init__(self, layer: Any, loop: Loop) -> None:
        self._layer = layer
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def inner_loop(
        self, sequences: tf.Tensor, initial_state: Any, mask: Any, training: bool = False
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Returns the last output, all outputs, and the last states."""
        cell = self._layer.cell
        if training and 0 < cell.dropout < 1:
            sequences *= cell.get_dropout_mask(sequences[:, 0, :])[:, None, :]
        return self._loop(sequences, initial_state, mask)


def reset_states(layer: Any) -> Callable[[], None]:
    """Returns the method that resets the states of a stateful recurrent layer."""
    return layer.reset_state
