"""Checks token ids and masks before a layer computes.

Without these checks, a wrong mask or id gives wrong outputs and no error. An additive mask that is
cast to boolean inverts attention, and a lookup treats -1 as the last row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfwd import current_watch
from tfwd._graph import private_graph_apis

# The dtype represents every integer up to this number exactly.
_EXACT_UP_TO = {tf.float32: 2**24, tf.float64: 2**53}

# The parts of a message: the rule, which begins with the layer, the following words, and the
# values.
_Message = tuple[str, str, list[Any]]


class InputChecks:
    """Checks of the inputs of one call of a layer.

    Shapes and dtypes are checked immediately. Values are checked immediately in eager mode, and by
    `tf.debugging.Assert` in a graph. XLA removes assertions. Under XLA, `nan_if_wrong` makes the
    output NaN, and a check of the step gets the argument's name.

    Args:
        layer: Layer, for messages.
    """

    def __init__(self, layer: keras.layers.Layer) -> None:
        self._where = f"{type(layer).__name__} '{layer.name}'"
        self._wrong: list[tf.Tensor] = []

    def ids(self, name: str, ids: Any, below: int, like: tf.Tensor | None = None) -> tf.Tensor:
        """Checks ids and returns them as a tensor `[batch, length]`.

        Args:
            name: Name of the argument.
            ids: Value of the argument: integers, or whole numbers in float32 or float64.
            below: int. Number of rows in the table.
            like: Token ids of the same length. The batch of `ids` can be 1. Default None.
        """
        ids = self._tensor(name, ids)
        # A Sequential without an Input casts integers to floats.
        are_floats = below <= _EXACT_UP_TO.get(ids.dtype, 0)
        if not ids.dtype.is_integer and not are_floats:
            raise TypeError(no_ids_text(self._where, name, ids.dtype.name))
        if ids.shape.rank not in (None, 2):
            raise ValueError(
                f"{self._where}: {name} has the shape {_shown(ids)}: expected [batch, length]"
            )
        if like is not None:
            ids = self._of_length(name, ids, [(-1, like, 1)])
        if are_floats:
            rule = f"{self._where}: {name} must be whole numbers"
            message = (rule, ", but begins with", [tf.reshape(ids, [-1])[:8]])
            ids = self._require_each(tf.equal(tf.round(ids), ids), ids, message, ids)
        elif ids.dtype.size < 4:
            ids = tf.cast(ids, tf.int32)
        least, most = tf.reduce_min(ids), tf.reduce_max(ids)
        rule = f"{self._where}: {name} must be from 0 to {below - 1}"
        message = (rule, ", but has values from", [least, "to", most])
        ids = self._require_each((ids >= 0) & (ids < below), ids, message, ids)
        return tf.cast(ids, tf.int32) if are_floats else ids

    def length(self, ids: tf.Tensor, most: int) -> tf.Tensor:
        """Checks that the length of token ids is at most `most`, and returns the ids."""
        rule = f"{self._where} has positions for {most} tokens"
        advice = ": shorten the texts, or set a larger max_length. The texts have"
        length = ids.shape[1]
        if length is None:
            length = tf.shape(ids)[1]
            return self._require(length <= most, (rule, advice, [length]), ids)
        if length > most:
            raise ValueError(f"{rule}{advice} {length}")
        return ids

    def mask(self, name: str, mask: Any, keys: tf.Tensor, queries: tf.Tensor) -> tf.Tensor:
        """Returns a mask as booleans, `[batch, keys]` or `[batch, queries, keys]`.

        Args:
            name: Name of the argument.
            mask: Value of the argument: booleans, or zeros and ones.
            keys: Masked tensor, `[batch, keys, ...]`.
            queries: Tensor that attends to the keys, `[batch, queries, ...]`.
        """
        mask = self._tensor(name, mask)
        if mask.shape.rank not in (None, 2, 3):
            raise ValueError(
                f"{self._where}: {name} has the shape {_shown(mask)}: expected [batch, length], or "
                "[batch, queries, length]"
            )
        pairs = [(-1, keys, 1)]
        if mask.shape.rank == 3:
            pairs.append((1, queries, 1))
        mask = self._of_length(name, mask, pairs)
        if mask.dtype == tf.bool:
            return mask
        zero, one = tf.zeros([], mask.dtype), tf.ones([], mask.dtype)
        zeros, ones = tf.equal(mask, zero), tf.equal(mask, one)
        rule = (
            f"{self._where}: {name} must be boolean, or zeros and ones, with 1 for text. "
            "An additive mask, (1 - mask) * -10000, is wrong: pass the mask itself"
        )
        extremes = tf.stack([tf.reduce_min(mask), tf.reduce_max(mask)])
        message = (rule, ". Its smallest and largest values are", [extremes])
        return self._require_each(zeros | ones, mask, message, ones)

    def nan_if_wrong(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor. Under XLA it becomes NaN if an input is wrong."""
        if not self._wrong:
            return tensor
        zero = tf.zeros([], tensor.dtype)
        nan = tf.constant(float("nan"), tensor.dtype)
        return tensor + tf.where(tf.reduce_any(tf.stack(self._wrong)), nan, zero)

    def _tensor(self, name: str, value: Any) -> tf.Tensor:
        if isinstance(value, (list, tuple, Mapping)):
            raise TypeError(
                f"{self._where}: {name} is a {type(value).__name__}: pass a tensor or an array"
            )
        if isinstance(value, tf.RaggedTensor):
            raise TypeError(
                f"{self._where}: {name} is a RaggedTensor: pass a dense tensor, made by to_tensor()"
            )
        return tf.convert_to_tensor(value)

    def _of_length(
        self, name: str, tensor: tf.Tensor, pairs: list[tuple[int, tf.Tensor, int]]
    ) -> tf.Tensor:
        """Checks that axes of a tensor, and its batch, have the length of other tensors' axes."""
        for axis, other, its in [*pairs, (0, pairs[0][1], 0)]:
            shape = tf.TensorShape(other.shape)
            if tensor.shape.rank is None or shape.rank is None:
                continue
            ours, theirs = tensor.shape[axis], shape[its]
            rule = f"{self._where}: {name} must be as long as the input"
            if ours is not None and theirs is not None:
                if ours != theirs and (axis == -1 or ours != 1):
                    raise ValueError(
                        f"{self._where}: {name} has the shape {_shown(tensor)}, but the input has "
                        f"{_shown(other)}: use the same batch and length"
                    )
            elif axis == -1:  # a tensor of length 1 would be broadcast
                ours, theirs = tf.shape(tensor)[axis], tf.shape(other)[its]
                message = (rule, ", but the lengths are", [ours, theirs])
                tensor = self._require(tf.equal(ours, theirs), message, tensor)
        return tensor

    def _require(self, ok: tf.Tensor, message: _Message, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor if a condition holds. Otherwise raises an error, except under XLA."""
        if private_graph_apis.in_xla():
            rule = message[0].removeprefix(self._where)
            current_watch.check_argument(rule, ok, tf.stack(message[2]))
        return self._checked(ok, message, tensor)

    def _require_each(
        self, good: tf.Tensor, values: tf.Tensor, message: _Message, tensor: tf.Tensor
    ) -> tf.Tensor:
        """Returns the tensor if a condition holds for each value. Otherwise acts as `_require`."""
        if private_graph_apis.in_xla():
            current_watch.check_argument(message[0].removeprefix(self._where), good, values)
        return self._checked(tf.reduce_all(good), message, tensor)

    def _checked(self, ok: tf.Tensor, message: _Message, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor. If a condition does not hold, raises the message or marks it."""
        rule, tail, data = message
        if tf.executing_eagerly():
            if not ok:
                raise ValueError(" ".join([rule + tail, *map(_text, data)]))
            return tensor
        if private_graph_apis.in_xla():
            self._wrong.append(tf.logical_not(ok))
            return tensor
        held = tf.debugging.Assert(ok, [rule + tail, *data], summarize=8)
        with tf.control_dependencies([held]):
            return tf.identity(tensor)


def no_ids_text(where: str, name: str, dtype: str) -> str:
    """Returns the error for an argument whose dtype cannot be ids."""
    return (
        f"{where}: {name} has the dtype {dtype}: expected integers. Pass a mask as mask=...; "
        "a model needs keras.Input(..., dtype='int32') as its first layer"
    )


def _text(value: Any) -> str:
    return str(value.numpy().tolist()) if isinstance(value, tf.Tensor) else str(value)


def _shown(tensor: tf.Tensor) -> str:
    return str(list(tensor.shape)).replace("None", "?")
