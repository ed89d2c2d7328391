"""The call of a `keras.layers.LSTM`, with its loop replaced by a faster one where that computes the
same.

Everything around the loop (states, stateful updates, dropout of the inputs, casts) stays Keras's:
its own `call` runs on a stand-in for the layer that differs in `inner_loop` only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfwd import _graphs, _keras, lstm


def call(
    layer: keras.layers.LSTM,
    sequences: Any,
    initial_state: Any = None,
    mask: Any = None,
    training: bool = False,
) -> Any:
    """What `keras.layers.LSTM.call` returns for this layer, and does to its states.

    The fast loop is taken for the default activations, without `recurrent_dropout` and `unroll`,
    and with Keras's own cell. In all other cases, and where there is a GPU, for which Keras has
    cuDNN's loop, it is Keras's call.

    Args:
        layer: the layer, built. Its weights are read as attributes of its cell.
        sequences: `[batch, time, features]`.
        initial_state: list of `h` and `c`, each `[batch, units]`, or None for the layer's own.
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
    if not _applies(layer, sequences):
        return keras.layers.LSTM.call(layer, sequences, **arguments)
    return keras.layers.RNN.call(_FastLoop(layer), sequences, **arguments)


def training_call(
    layer: keras.layers.LSTM, *args: Any, training: bool = False, **kwargs: Any
) -> Any:
    """`call` while training, and in evaluation the layer itself, to the last bit."""
    run: Callable[..., Any] = functools.partial(call, layer) if training else layer
    return run(*args, training=training, **kwargs)


def is_plain(layer: keras.Layer) -> bool:
    """Whether `training_call` does for the layer what a call of it does."""
    return type(layer).call is keras.layers.LSTM.call and not _keras.is_altered(layer)


def _applies(layer: keras.layers.LSTM, sequences: Any) -> bool:
    """Whether the fast loop computes what the layer does."""
    cell = layer.cell
    return (
        type(cell) is keras.layers.LSTMCell
        and type(layer).inner_loop is keras.layers.LSTM.inner_loop
        and cell.activation is keras.activations.tanh
        and cell.recurrent_activation is keras.activations.sigmoid
        and not cell.recurrent_dropout
        and not (cell.dropout and cell.implementation == 1)  # a mask for each gate
        and cell.autocast
        and not layer.unroll
        and layer.use_cudnn is not True  # which is an error where there is no GPU
        and not tf.config.list_logical_devices("GPU")
        and not _graphs.in_branch()  # where a gradient by hand cannot be followed from outside
        and isinstance(sequences, tf.Tensor)
        and sequences.shape.rank == 3
        and sequences.dtype == cell.compute_dtype
    )


class _FastLoop:
    """The layer in all but its `inner_loop`."""

    def __init__(self, layer: keras.layers.LSTM) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def inner_loop(
        self, sequences: tf.Tensor, initial_state: list, mask: Any, training: bool = False
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Returns the last output, all outputs, and the last states."""
        cell = self._layer.cell
        if training and 0 < cell.dropout < 1:
            sequences *= cell.get_dropout_mask(sequences[:, 0, :])[:, None, :]
        if isinstance(mask, (list, tuple)):
            mask = mask[0]
        if mask is not None:
            mask = tf.reshape(mask, tf.shape(mask)[:2])  # Keras takes [batch, time, 1] too
            mask = tf.transpose(tf.cast(mask, tf.bool))
        inputs = tf.transpose(sequences, [1, 0, 2])
        if self._layer.go_backwards:
            inputs = tf.reverse(inputs, [0])
            mask = None if mask is None else tf.reverse(mask, [0])
        names = ["kernel", "recurrent_kernel", *(["bias"] if cell.use_bias else [])]
        values = {n: tf.cast(tf.convert_to_tensor(getattr(cell, n)), inputs.dtype) for n in names}
        first = [tf.cast(tf.convert_to_tensor(state), inputs.dtype) for state in initial_state]
        outputs, h, c = lstm.lstm(inputs, first, mask=mask, **values)
        last = h
        if mask is not None:
            shown = mask
            if not self._layer.zero_output_for_mask:
                # A masked step repeats the output before it, and the first ones have none.
                shown = tf.cumsum(tf.cast(mask, tf.int32)) > 0
            outputs = tf.where(shown[:, :, None], outputs, tf.zeros_like(outputs))
            last = tf.where(shown[-1][:, None], h, tf.zeros_like(h))
        return last, tf.transpose(outputs, [1, 0, 2]), [h, c]
