"""Calls an LSTM or GRU, by the fast loop where that is equivalent.

Everything around the loop (states, stateful updates, dropout of the inputs, casts) stays Keras's:
its own `call` runs on a stand-in for the layer that differs in `inner_loop` only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._graph import graphs
from tfwd._recurrent import gru, lstm
from tfwd.layers._substitution import overriding


class _Kind(NamedTuple):
    """A kind of layer that there is a faster loop for.

    Attributes:
        layer: Keras's layer.
        cell: its cell.
        gates: how many gates the cell has.
        run: from the inputs `[time, batch, features]`, the list of first states and the weights by
            name to the outputs and the list of last states.
    """

    layer: Any
    cell: Any
    gates: int
    run: Callable[..., tuple[tf.Tensor, list[tf.Tensor]]]


def _lstm(inputs: tf.Tensor, first: list, **weights: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
    outputs, *last = lstm.lstm(inputs, first, **weights)
    return outputs, last


def _gru(inputs: tf.Tensor, first: list, **weights: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
    outputs, last = gru.gru(inputs, *first, **weights)
    return outputs, [last]


_KINDS = (
    _Kind(keras.layers.LSTM, keras.layers.LSTMCell, 4, _lstm),
    _Kind(keras.layers.GRU, keras.layers.GRUCell, 3, _gru),
)


def _kind(layer: keras.Layer) -> _Kind | None:
    return next((kind for kind in _KINDS if isinstance(layer, kind.layer)), None)


def call(
    layer: keras.layers.RNN,
    sequences: Any,
    initial_state: Any = None,
    mask: Any = None,
    training: bool = False,
) -> Any:
    """What `call` of `keras.layers.LSTM` or `GRU` returns for this layer, and does to its states.

    The fast loop is taken for the default activations, without `recurrent_dropout` and `unroll`,
    with Keras's own cell, and for a GRU with `reset_after`. In all other cases, and where there is
    a GPU, for which Keras has cuDNN's loop, it is Keras's call.

    Args:
        layer: an LSTM or a GRU, built. Its weights are read as attributes of its cell.
        sequences: `[batch, time, features]`.
        initial_state: list of the states, each `[batch, units]`, or None for the layer's own.
        mask: boolean `[batch, time]`, or None.
        training: the training flag.

    Returns:
        What the layer returns, as `return_sequences` and `return_state` say.

    Example:

    >>> layer = keras.layers.LSTM(4, return_sequences=True)
    >>> x = tf.ones([2, 3, 5])
    >>> bool(tf.reduce_all(tf.abs(layer(x) - call(layer, x)) < 1e-6))
    True
    """
    arguments = {"initial_state": initial_state, "mask": mask, "training": training}
    kind = _kind(layer)
    if kind is None:
        raise TypeError(f"'{layer.name}' is a {type(layer).__name__}, neither an LSTM nor a GRU")
    if initial_state is not None and not isinstance(initial_state, (list, tuple)):
        arguments["initial_state"] = [initial_state]  # a GRU has only one
    if not _applies(layer, sequences):
        return kind.layer.call(layer, sequences, **arguments)
    loop = functools.partial(_loop, layer, kind)
    return _keras.recurrent.call_with_loop(layer, kind.gates, loop, sequences, **arguments)


def either_call(
    layer: keras.layers.RNN,
    otherwise: Callable[..., Any],
    sequences: tf.Tensor,
    *states: Any,
    training: bool = False,
    **given: Any,
) -> Any:
    """A call of a plain layer: by `call` while training, and else by `otherwise`.

    Args:
        layer: an LSTM or a GRU that `is_plain`.
        otherwise: the layer itself, or its `call`, which gets its masks given.
        sequences, states, training, given: the arguments.
    """
    if not training:
        return otherwise(sequences, *states, training=training, **given)
    if not isinstance(sequences, tf.Tensor):
        return otherwise(sequences, *states, training=training, **given)
    given |= zip(("initial_state", "mask"), states, strict=False)
    past_masks = otherwise is not layer
    if past_masks:
        return call(layer, sequences, training=training, **given)
    applied, carried = _keras.wrapping.masks_of_sequences(sequences, given)
    sequences = _keras.wrapping.converted(layer, sequences)
    outputs = call(layer, sequences, training=training, **{**given, "mask": applied})
    # As the layer itself would mark them: both branches of a `tf.cond` must give the same.
    masks = tf.nest.flatten(layer.compute_mask(sequences, carried))
    for output, found in zip(tf.nest.flatten(outputs), masks, strict=False):
        if found is not None:
            _keras.layers.set_mask(output, found)
    return outputs


def is_plain(layer: keras.Layer) -> bool:
    """Whether a call of the layer is what `call` computes, and nothing that a user wrote."""
    kind = _kind(layer)
    return kind is not None and overriding.is_plain(layer, kind.layer)


def _applies(layer: keras.layers.RNN, sequences: Any) -> bool:
    """Whether the fast loop computes what the layer does."""
    kind = _kind(layer)
    cell: Any = layer.cell
    return (
        kind is not None
        and overriding.is_plain(layer, kind.layer, ours=True)
        and type(cell) is kind.cell
        and overriding.is_plain(cell, kind.cell)
        and _keras.recurrent.has_plain_loop(layer)
        and cell.activation is keras.activations.tanh
        and cell.recurrent_activation is keras.activations.sigmoid
        and getattr(cell, "reset_after", True)  # else a GRU has another product for its candidate
        and not cell.recurrent_dropout
        and not (cell.dropout and cell.implementation == 1)  # a mask for each gate
        and not tf.config.list_logical_devices("GPU")
        and not graphs.in_branch()  # where a gradient by hand cannot be followed from outside
        and not graphs.is_saving()
        and isinstance(sequences, tf.Tensor)
        and sequences.shape.rank == 3
        and sequences.dtype == cell.compute_dtype
    )


def _loop(
    layer: keras.layers.RNN, kind: _Kind, sequences: tf.Tensor, initial_state: Any, mask: Any
) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
    """The layer's loop: the last output, all outputs, and the last states."""
    cell: Any = layer.cell
    if isinstance(mask, (list, tuple)):
        mask = mask[0]
    if mask is not None:
        mask = tf.reshape(mask, tf.shape(mask)[:2])  # Keras takes [batch, time, 1] too
        mask = tf.transpose(tf.cast(mask, tf.bool))
    inputs = tf.transpose(sequences, [1, 0, 2])
    if layer.go_backwards:
        inputs = tf.reverse(inputs, [0])
        mask = None if mask is None else tf.reverse(mask, [0])
    names = ["kernel", "recurrent_kernel", *(["bias"] if cell.use_bias else [])]
    values = {n: tf.cast(tf.convert_to_tensor(getattr(cell, n)), inputs.dtype) for n in names}
    states = tf.nest.flatten(initial_state)
    first = [tf.cast(tf.convert_to_tensor(state), inputs.dtype) for state in states]
    outputs, last_states = kind.run(inputs, first, mask=mask, **values)
    # A list over time, of which they come, knows nothing of its length.
    outputs = tf.ensure_shape(outputs, [*inputs.shape[:2], outputs.shape[2]])
    last = last_states[0]
    if mask is not None:
        shown = mask
        if not layer.zero_output_for_mask:
            # A masked step repeats the output before it, and the first ones have none.
            shown = tf.cumsum(tf.cast(mask, tf.int32)) > 0
        outputs = tf.where(shown[:, :, None], outputs, tf.zeros_like(outputs))
        last = tf.where(shown[-1][:, None], last, tf.zeros_like(last))
    return last, tf.transpose(outputs, [1, 0, 2]), last_states
