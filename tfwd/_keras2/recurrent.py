"""Runs a recurrent layer of Keras 2.15 with another loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# A loop takes inputs, first states and mask. It returns last output, all outputs and last states.
Loop = Callable[[tf.Tensor, Any, Any], tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]]


def has_plain_loop(layer: Any) -> bool:
    """Returns True if a layer of Keras's class has the usual loop, neither cuDNN's nor unrolled."""
    cell = layer.cell
    return (
        not layer.unroll
        and not layer.time_major
        and not getattr(layer, "return_runtime", False)
        and cell._autocast
        # Otherwise Keras loops over its cell, which drops the same inputs at every step.
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
