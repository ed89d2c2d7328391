"""Checks of what layers are given, before they compute: token ids and masks.

A wrong mask or a wrong id gives a wrong number and no error: an additive mask cast to boolean
inverts attention, and a lookup takes -1 as the last row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfwd import _graphs, _keras, finite

# Up to where each whole number is one of the dtype.
_WHOLE_UP_TO = {tf.float32: 2**24, tf.float64: 2**53}

# A rule that begins with the layer, how a message goes on, and what it ends with.
_Told = tuple[str, str, list[Any]]


class Inputs:
    """The inputs of one call of a layer, each checked once.

    Shapes and dtypes are checked at once. Values are checked at once in eager mode, and by
    `tf.debugging.Assert` in a graph. XLA drops assertions: there `marked` makes the output NaN,
    and what looks at the step is told.

    Args:
        layer: the layer, for messages.
    """

    def __init__(self, layer: keras.layers.Layer) -> None:
        self._where = f"{type(layer).__name__} '{layer.name}'"
        self._wrong: list[tf.Tensor] = []

    def ids(self, name: str, ids: Any, below: int, like: tf.Tensor | None = None) -> tf.Tensor:
        """Returns a tensor of ids, `[batch, length]`, that are checked.

        Args:
            name: the argument's name.
            ids: its value: integers, or float32 or float64 numbers that are whole.
            below: the number of rows in the table.
            like: the token ids whose length it must have; its batch may be 1.
        """
        ids = self._tensor(name, ids)
        # (A Sequential without an Input hands integers on as floats.)
        are_floats = below <= _WHOLE_UP_TO.get(ids.dtype, 0)
        if not ids.dtype.is_integer and not are_floats:
            raise TypeError(_no_ids(self._where, name, ids.dtype.name))
        if ids.shape.rank not in (None, 2):
            raise ValueError(
                f"{self._where}: {name} has the shape {_shown(ids)}: give [batch, length]"
            )
        if like is not None:
            ids = self._of_length(name, ids, [(-1, like, 1)])
        if are_floats:
            rule = f"{self._where}: {name} must be whole numbers"
            told = (rule, ", and begins with", [tf.reshape(ids, [-1])[:8]])
            ids = self._require_each(tf.equal(tf.round(ids), ids), ids, told, ids)
        elif ids.dtype.size < 4:
            ids = tf.cast(ids, tf.int32)
        least, most = tf.reduce_min(ids), tf.reduce_max(ids)
        rule = f"{self._where}: {name} must be from 0 to {below - 1}"
        told = (rule, ", and goes from", [least, "to", most])
        ids = self._require_each((ids >= 0) & (ids < below), ids, told, ids)
        return tf.cast(ids, tf.int32) if are_floats else ids

    def length(self, ids: tf.Tensor, most: int) -> tf.Tensor:
        """Returns token ids, which are at most so many."""
        rule = f"{self._where} has positions for {most} tokens"
        advice = ": cut the texts, or give another max_length; the texts have"
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
            name: the argument's name.
            mask: its value: booleans, or zeros and ones.
            keys: what it masks, `[batch, keys, ...]`.
            queries: what looks at it, `[batch, queries, ...]`.
        """
        mask = self._tensor(name, mask)
        if mask.shape.rank not in (None, 2, 3):
            raise ValueError(
                f"{self._where}: {name} has the shape {_shown(mask)}: give [batch, length], or "
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
            f"{self._where}: {name} must be boolean, or of zeros and ones: 1 where there is text. "
            "An additive mask, (1 - mask) * -10000, is not one: give the mask itself"
        )
        told = (rule, ". It has", [tf.reshape(mask, [-1])[:8]])
        return self._require_each(zeros | ones, mask, told, ones)

    def marked(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor, all NaN where XLA has found an input wrong."""
        if not self._wrong:
            return tensor
        zero = tf.zeros([], tensor.dtype)
        nan = tf.constant(float("nan"), tensor.dtype)
        return tensor + tf.where(tf.reduce_any(tf.stack(self._wrong)), nan, zero)

    def _tensor(self, name: str, value: Any) -> tf.Tensor:
        if isinstance(value, (list, tuple, Mapping)):
            raise TypeError(
                f"{self._where}: {name} is a {type(value).__name__}: give a tensor or an array"
            )
        if isinstance(value, tf.RaggedTensor):
            raise TypeError(
                f"{self._where}: {name} is a RaggedTensor: give a dense one, as by to_tensor()"
            )
        return tf.convert_to_tensor(value)

    def _of_length(
        self, name: str, tensor: tf.Tensor, pairs: list[tuple[int, tf.Tensor, int]]
    ) -> tf.Tensor:
        """Returns the tensor, some of whose axes are as long as those of others; its batch too."""
        for axis, other, its in [*pairs, (0, pairs[0][1], 0)]:
            shape = tf.TensorShape(other.shape)
            if tensor.shape.rank is None or shape.rank is None:
                continue
            ours, theirs = tensor.shape[axis], shape[its]
            rule = f"{self._where}: {name} must be as long as the input"
            if ours is not None and theirs is not None:
                if ours != theirs and (axis == -1 or ours != 1):
                    raise ValueError(
                        f"{self._where}: {name} has the shape {_shown(tensor)}, and the input "
                        f"{_shown(other)}: give one of the same batch and length"
                    )
            elif axis == -1:  # of length 1 it would count for all
                ours, theirs = tf.shape(tensor)[axis], tf.shape(other)[its]
                told = (rule, ", and their lengths are", [ours, theirs])
                tensor = self._require(tf.equal(ours, theirs), told, tensor)
        return tensor

    def _require(self, ok: tf.Tensor, told: _Told, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor if a condition holds; else says what is wrong."""
        if _graphs.in_xla():
            finite.look_at_argument(told[0].removeprefix(self._where), ok, tf.stack(told[2]))
        return self._checked(ok, told, tensor)

    def _require_each(
        self, good: tf.Tensor, values: tf.Tensor, told: _Told, tensor: tf.Tensor
    ) -> tf.Tensor:
        """Returns the tensor if a condition holds for each value; else says what is wrong."""
        if _graphs.in_xla():
            finite.look_at_argument(told[0].removeprefix(self._where), good, values)
        return self._checked(tf.reduce_all(good), told, tensor)

    def _checked(self, ok: tf.Tensor, told: _Told, tensor: tf.Tensor) -> tf.Tensor:
        rule, tail, data = told
        if tf.executing_eagerly():
            if not ok:
                raise ValueError(" ".join([rule + tail, *map(_text, data)]))
            return tensor
        if _graphs.in_xla():
            self._wrong.append(tf.logical_not(ok))
            return tensor
        held = tf.debugging.Assert(ok, [rule + tail, *data], summarize=8)
        with tf.control_dependencies([held]):
            return tf.identity(tensor)


def _no_ids(where: str, name: str, dtype: str) -> str:
    return (
        f"{where}: {name} has the dtype {dtype}: give integers; a mask goes to mask=..., a model "
        "needs keras.Input(..., dtype='int32') as its first layer"
    )


def _text(value: Any) -> str:
    return str(value.numpy().tolist()) if isinstance(value, tf.Tensor) else str(value)


def _shown(tensor: tf.Tensor) -> str:
    return str(list(tensor.shape)).replace("None", "?")


def of_places(mask: Any) -> Any:
    """Returns a mask that later layers may take from Keras: one of places, as booleans; or None.

    One for each query, `[batch, queries, keys]`, says nothing of places.
    """
    if mask is None or len(mask.shape) != 2:
        return None
    is_bool = getattr(mask.dtype, "name", mask.dtype) == "bool"
    return mask if is_bool else _keras.ops.not_equal(mask, 0)


class OfIds:
    """Base of layers whose input is token ids, alone or in a dict as tokenizers give it.

    Attributes:
        names: for each key of such a dict the argument of `call`; "" for the first one.
        former: for each former name of an argument its name now, for models in files.
        positional: how many arguments may be given by position.
    """

    name: str
    names: ClassVar[dict[str, str]] = {}
    former: ClassVar[dict[str, str]] = {}
    positional = 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        where = f"{type(self).__name__} '{self.name}'"
        if len(args) > self.positional:
            others = ", ".join(f"{name}=..." for name in dict.fromkeys(self.names.values()) if name)
            raise TypeError(
                f"{where}: {len(args)} arguments by position: give those after the ids by name, as "
                f"{others}"
            )
        for name, value in (*(("ids", value) for value in args), *kwargs.items()):
            if isinstance(value, (list, tuple)):
                raise TypeError(
                    f"{where}: {name} is a {type(value).__name__}: give a tensor or an array"
                )
            for key, part in value.items() if isinstance(value, Mapping) else [(name, value)]:
                dtype = getattr(part, "dtype", None)
                dtype = getattr(dtype, "name", dtype)
                if dtype in ("float16", "bfloat16") and "mask" not in key:  # Keras would cast them
                    raise TypeError(_no_ids(where, key, dtype))
        if args and isinstance(args[0], Mapping):  # also one of Hugging Face's, which is no dict
            args = (dict(args[0]), *args[1:])
        for before, now in self.former.items():
            if before in kwargs:
                kwargs[now] = kwargs.pop(before)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def unpacked(self: Any, inputs: Any, **given: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the token ids, and the other arguments as they are or as the dict has them.

        Raises:
            ValueError: the dict has no token ids, a key that is not known, or what is given by name
                too.
        """
        if not isinstance(inputs, Mapping):
            return inputs, given
        where, ids = f"{type(self).__name__} '{self.name}'", None
        for key, value in inputs.items():
            if key not in self.names:
                raise ValueError(
                    f"{where}: the inputs have {key!r}, which it does not take: leave it out; "
                    f"it takes {', '.join(self.names)}"
                )
            name = self.names[key]
            if not name and ids is None:
                ids = value
            elif name and given.get(name) is None:
                given[name] = value
            else:
                raise ValueError(f"{where}: {name or key} is given twice, once as {key!r}")
        if ids is None:
            raise ValueError(
                f"{where}: the inputs have no 'input_ids', but {', '.join(map(repr, inputs))}"
            )
        return ids, given

    def ids_of(self: Any, inputs: Any, name: str = "") -> Any:
        """Returns the token ids, or what belongs to them, of a dict or of what is none."""
        if not isinstance(inputs, Mapping):
            return inputs
        return next((v for key, v in inputs.items() if self.names.get(key) == name), None)


# By this AutoGraph knows that there is nothing to rewrite.
OfIds.__call__.autograph_info__ = {}  # type: ignore[attr-defined]
