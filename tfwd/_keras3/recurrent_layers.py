"""Parts of the calls of Keras 3's recurrent layers: loops, states, masks and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfwd._keras3.layers import get_mask

# A loop takes inputs, initial states and mask. It returns last output, outputs and last states.
Loop = Callable[[tf.Tensor, Any, Any], tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]]


def has_plain_loop(layer: Any) -> bool:
    """Returns True if a layer of Keras's class has the usual loop, without cuDNN or unrolling."""
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


def masks_of_sequences(sequences: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """Returns two masks of a recurrent layer's call: the applied mask, and the outputs' mask.

    Keras 3 applies the mask of the sequences if the sequences are the only tensor.

    Args:
        sequences: First argument of the layer.
        given: Other arguments by name, without the training flag.
    """
    mask, carried = given.get("mask"), get_mask(sequences)
    if mask is not None:
        return mask, mask
    state = given.get("initial_state")
    alone = state is None or not tf.nest.flatten(state)
    return carried if alone else None, carried


def recurrent_arguments(
    layer: Any,
    sequences: tf.Tensor,
    initial_state: Any = None,
    mask: Any = None,
    training: Any = False,
) -> tuple[tf.Tensor, Any, Any, Any] | None:
    """Returns a recurrent layer's inputs, initial states, mask and training flag.

    It returns None if the layer must use another loop, which does not occur on Keras 3.
    """
    return sequences, initial_state, mask, training


def initial_states(layer: Any, sequences: tf.Tensor, given: Any) -> list[tf.Tensor]:
    """Returns the initial states of a recurrent layer with one cell, as its call computes them."""
    if given is None:
        batch = keras.ops.shape(sequences)[0]
        given = layer.states if layer.stateful else layer.get_initial_state(batch_size=batch)
    given = list(given) if isinstance(given, (list, tuple)) else [given]
    # For a stateful layer Keras passes the variables, which the last states will overwrite.
    given = [tf.convert_to_tensor(s.value if isinstance(s, keras.Variable) else s) for s in given]
    return [keras.ops.convert_to_tensor(s, dtype=layer.cell.compute_dtype) for s in given]


def recurrent_dropout(
    layer: Any, sequences: tf.Tensor, states: list[tf.Tensor]
) -> tuple[tf.Tensor | None, tf.Tensor | None]:
    """Returns the dropout factors of a recurrent layer's inputs and states in one training call."""
    cell = layer.cell
    layer._maybe_config_dropout_masks(cell, sequences[:, 0, :], states)
    inputs = cell.get_dropout_mask(sequences[:, 0, :])
    factor = cell.get_recurrent_dropout_mask(states[0])
    layer._maybe_reset_dropout_masks(cell)
    return None if inputs is None else inputs[:, tf.newaxis], factor
