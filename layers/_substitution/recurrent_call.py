"""Calls an LSTM or GRU, with the fast loop if it is equivalent.

Keras's own code handles everything around the loop: states, stateful updates, dropout of the
inputs, casts. Keras's `call` runs on a stand-in for the layer that differs only in `inner_loop`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._graph import private_graph_apis
from tfwd._recurrent import gru, lstm
from tfwd.layers._substitution import caller_detection, keras_own_layers


class _Kind(NamedTuple):
    """A kind of layer that has a fast loop.

    Attributes:
        layer: Keras's layer class.
        cell: Keras's cell class.
        gates: Number of gates of the cell.
        run: Function that runs the loop. It takes the inputs `[time, batch, features]`, the list of
            first states and the weights by name. It returns the outputs and the list of last
            states.
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
    """Computes the same as `call` of `keras.layers.LSTM` or `GRU`, and updates the same states.

    The fast loop needs the default activations, no `recurrent_dropout`, no `unroll`, and Keras's
    own cell. For a GRU it also needs `reset_after`. In all other cases Keras's call runs. Keras's
    call also runs if there is a GPU, because Keras has cuDNN's loop for it.

    Args:
        layer: LSTM or GRU, built. Its weights are read as attributes of its cell.
        sequences: `[batch, time, features]`.
        initial_state: List of the states, each `[batch, units]`. Default None, for the layer's own
            states.
        mask: Boolean `[batch, time]`. Default None, for no mask.
        training: bool. Training flag. Default False.

    Returns:
        The layer's result, which depends on `return_sequences` and `return_state`.

    Example:
        >>> layer = keras.layers.LSTM(4, return_sequences=True)
        >>> x = tf.ones([2, 3, 5])
        >>> bool(tf.reduce_all(tf.abs(layer(x) - call(layer, x)) < 1e-6))
        True
    """
    arguments = {"initial_state": initial_state, "mask": mask, "training": training}
    kind = _kind(layer)
    if kind is None:
        raise TypeError(
            f"layer '{layer.name}' is of type {type(layer).__name__}: expected an LSTM or a GRU"
        )
    if initial_state is not None and not isinstance(initial_state, (list, tuple)):
        arguments["initial_state"] = [initial_state]  # a GRU has only one state
    if not _applies(layer, sequences):
        return kind.layer.call(layer, sequences, **arguments)
    loop = functools.partial(_loop, layer, kind)
    return _keras.recurrent_layers.call_with_loop(layer, kind.gates, loop, sequences, **arguments)


def fast_or_plain_call(
    layer: keras.layers.RNN,
    otherwise: Callable[..., Any],
    sequences: tf.Tensor,
    *states: Any,
    training: bool = False,
    **given: Any,
) -> Any:
    """Calls a plain layer with `call` in training and sampling, else with `otherwise`.

    Args:
        layer: LSTM or GRU for which `is_plain` returns True.
        otherwise: The layer itself, or its `call`, which takes masks as arguments.
        sequences: `[batch, time, features]`.
        *states: Other positional arguments: the initial state and the mask.
        training: bool. Training flag. Default False.
        **given: Keyword arguments.
    """
    if not (training or caller_detection.is_sampling()):
        return otherwise(sequences, *states, training=training, **given)
    if not isinstance(sequences, tf.Tensor):
        return otherwise(sequences, *states, training=training, **given)
    given |= zip(("initial_state", "mask"), states, strict=False)
    takes_masks = otherwise is not layer
    if takes_masks:
        return call(layer, sequences, training=training, **given)
    applied, carried = _keras.recurrent_layers.masks_of_sequences(sequences, given)
    sequences = _keras.layer_wrappers.converted(layer, sequences)
    outputs = call(layer, sequences, training=training, **{**given, "mask": applied})
    # Attach the masks that the layer would attach: both branches of a `tf.cond` must return the
    # same.
    masks = tf.nest.flatten(layer.compute_mask(sequences, carried))
    for output, found in zip(tf.nest.flatten(outputs), masks, strict=False):
        if found is not None:
            _keras.layers.set_mask(output, found)
    return outputs


def is_plain(layer: keras.Layer) -> bool:
    """Returns True if a call of the layer computes the same as `call`, without custom code."""
    kind = _kind(layer)
    return kind is not None and keras_own_layers.is_plain(layer, kind.layer)


def _applies(layer: keras.layers.RNN, sequences: Any) -> bool:
    """Returns True if the fast loop computes the same as the layer."""
    kind = _kind(layer)
    cell: Any = layer.cell
    return (
        kind is not None
        and keras_own_layers.is_plain(layer, kind.layer, ours=True)
        and type(cell) is kind.cell
        and keras_own_layers.is_plain(cell, kind.cell)
        and _keras.recurrent_layers.has_plain_loop(layer)
        and cell.activation is keras.activations.tanh
        and cell.recurrent_activation is keras.activations.sigmoid
        and getattr(cell, "reset_after", True)  # else a GRU computes its candidate in another way
        and not cell.recurrent_dropout
        and not (cell.dropout and cell.implementation == 1)  # a mask for each gate
        and not tf.config.list_logical_devices("GPU")
        # A hand-written gradient cannot be differentiated from outside.
        and not private_graph_apis.in_branch()
        and not private_graph_apis.is_saving()
        and isinstance(sequences, tf.Tensor)
        and sequences.shape.rank == 3
        and sequences.dtype == cell.compute_dtype
    )


def _loop(
    layer: keras.layers.RNN, kind: _Kind, sequences: tf.Tensor, initial_state: Any, mask: Any
) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
    """Runs the layer's loop. Returns the last output, all outputs, and the last states."""
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
    # The outputs come from a list over time, whose static length is unknown.
    outputs = tf.ensure_shape(outputs, [*inputs.shape[:2], outputs.shape[2]])
    last = last_states[0]
    if mask is not None:
        shown = mask
        if not layer.zero_output_for_mask:
            # A masked step repeats the previous output. The first masked steps have none.
            shown = tf.cumsum(tf.cast(mask, tf.int32)) > 0
        outputs = tf.where(shown[:, :, None], outputs, tf.zeros_like(outputs))
        last = tf.where(shown[-1][:, None], last, tf.zeros_like(last))
    return last, tf.transpose(outputs, [1, 0, 2]), last_states
