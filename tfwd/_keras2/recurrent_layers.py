"""Parts of the calls of Keras 2.15's recurrent layers: loops, states, masks and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfwd._keras2.layers import get_mask

# A loop takes inputs, initial states and mask. It returns last output, outputs and last states.
Loop = Callable[[tf.Tensor, Any, Any], tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]]


def has_plain_loop(layer: Any) -> bool:
    """Returns True if a layer of Keras's class has the usual loop, without cuDNN or unrolling."""
    cell = layer.cell
    return (
        not layer.unroll
        and not layer.time_major
        and not getattr(layer, "return_runtime", False)
        and cell._autocast
        # Otherwise Keras loops over the cell, which drops the same inputs at every time step.
        and (layer._could_use_gpu_kernel or not cell.dropout)
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
    sequences, initial_state, _ = layer._process_inputs(sequences, initial_state, None)
    layer.reset_dropout_mask()
    dropped = layer.get_dropout_mask_for_cell(sequences, training, count=gates)
    if dropped is not None:
        sequences = sequences * dropped[0]
    last, outputs, states = loop(sequences, initial_state, mask)
    if layer.stateful:
        for variable, state in zip(layer.states, states, strict=True):
            variable.assign(tf.cast(state, variable.dtype))
    output = outputs if layer.return_sequences else last
    return [output, *states] if layer.return_state else output


def reset_states(layer: Any) -> Callable[[], None]:
    """Returns the method that resets the states of a stateful recurrent layer."""
    return layer.reset_states


def masks_of_sequences(sequences: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """Returns two masks of a recurrent layer's call: the applied mask, and the outputs' mask.

    Keras 2 uses the mask argument if it was passed, even if it is None. Otherwise it uses the mask
    of the sequences.

    Args:
        sequences: First argument of the layer.
        given: Other arguments by name, without the training flag.
    """
    mask = given["mask"] if "mask" in given else get_mask(sequences)
    return mask, mask


def recurrent_arguments(
    layer: Any,
    sequences: Any,
    mask: Any = None,
    training: Any = None,
    initial_state: Any = None,
    constants: Any = None,
) -> tuple[tf.Tensor, Any, Any, Any] | None:
    """Returns a recurrent layer's inputs, initial states, mask and training flag.

    It returns None if the layer must use another loop.
    """
    if not isinstance(sequences, tf.Tensor) or constants is not None or layer.time_major:
        return None
    return sequences, initial_state, mask, training


def initial_states(layer: Any, sequences: tf.Tensor, given: Any) -> list[tf.Tensor]:
    """Returns the initial states of a recurrent layer with one cell, as its call computes them."""
    _, given, _ = layer._process_inputs(sequences, given, None)
    # For a stateful layer Keras passes the variables, which the last states will overwrite.
    return [tf.cast(tf.convert_to_tensor(s), layer.cell.compute_dtype) for s in given]


# Number of masks that Keras draws in a layer's call. The products need only the first mask.
_MASKS = {keras.layers.SimpleRNN: 1, keras.layers.GRU: 3, keras.layers.LSTM: 4}


def recurrent_dropout(
    layer: Any, sequences: tf.Tensor, states: list[tf.Tensor]
) -> tuple[tf.Tensor | None, tf.Tensor | None]:
    """Returns the dropout factors of a recurrent layer's inputs and states in one training call."""
    count = next(number for kind, number in _MASKS.items() if isinstance(layer, kind))

    def first(masks: Any) -> tf.Tensor | None:
        return masks[0] if isinstance(masks, (list, tuple)) else masks

    if getattr(layer, "_could_use_gpu_kernel", False):
        # The layer itself applies dropout to all time steps, with a separate mask for each.
        layer.reset_dropout_mask()
        return first(layer.get_dropout_mask_for_cell(sequences, True, count=count)), None
    cell = layer.cell
    layer._maybe_reset_cell_dropout_mask(cell)
    inputs = first(cell.get_dropout_mask_for_cell(sequences[:, 0, :], True, count=count))
    factor = first(cell.get_recurrent_dropout_mask_for_cell(states[0], True, count=count))
    return None if inputs is None else inputs[:, tf.newaxis], factor
