"""`Data`: the inputs, targets and sample weights of a batch, and slices of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras


class Data(NamedTuple):
    """Inputs, targets and sample weights: tensors in any nest, with examples on the first axis.

    Attributes:
        x: Inputs.
        y: Targets.
        sample_weight: Sample weights, or None.
        size: int or scalar tensor. Number of examples.
    """

    x: Any
    y: Any
    sample_weight: Any
    size: int | tf.Tensor

    @classmethod
    def of(cls, x: Any, y: Any, sample_weight: Any) -> Data:
        """Converts arrays to tensors, and finds the number of examples.

        Raises:
            ValueError: If there is no example, or if the numbers of examples differ.
        """
        x, y, sample_weight = (
            tf.nest.map_structure(functools.partial(_tensor, name), _numbers(value))
            for name, value in (("x", x), ("y", y), ("sample_weight", sample_weight))
        )
        sizes: dict[str, Any] = {}
        for name, value in (("x", x), ("y", y), ("sample_weight", sample_weight)):
            for tensor in tf.nest.flatten(value):
                if tensor is None:
                    continue
                if tensor.shape.rank == 0:
                    raise ValueError(
                        f"{name} has no axis of examples: it is, or contains, the scalar "
                        f"{_shown(tensor)}. The first axis of every array must be the examples. "
                        "Lists are the structure of the inputs or outputs: pass np.array(...) "
                        "instead of lists of lists"
                    )
                sizes.setdefault(name, tensor.shape[0])
                if tensor.shape[0] != sizes[name]:
                    raise ValueError(
                        f"{name} has tensors with {sizes[name]} and with {tensor.shape[0]} "
                        "examples: pass the same number of examples in all tensors"
                    )
        if "x" not in sizes:
            raise ValueError("x is empty: pass the inputs of the model")
        known = {name: count for name, count in sizes.items() if count is not None}
        if len(set(known.values())) > 1:
            shown = ", ".join(f"{count} in {name}" for name, count in known.items())
            raise ValueError(
                f"the numbers of examples differ: {shown}. Pass the same number in all arguments"
            )
        if 0 in known.values():
            raise ValueError("the batch has no examples: pass at least one example")
        first = next(t for t in tf.nest.flatten(x) if t is not None)
        count = next(iter(known.values()), None)
        return cls(x, y, sample_weight, tf.shape(first)[0] if count is None else count)

    def never_empty(self) -> Data:
        """Returns a batch with at least one example. An empty batch gets an example of zeros.

        The moments of this example are discarded later. A batch of known size is returned
        unchanged.
        """
        if isinstance(self.size, int):
            return self
        missing = tf.maximum(1 - self.size, 0)

        def filled(tensor: Any) -> Any:
            if not isinstance(tensor, tf.Tensor):
                return tensor
            shape = tf.concat([[missing], tf.shape(tensor)[1:]], 0)
            blank = "" if tensor.dtype == tf.string else tf.zeros([], tensor.dtype)
            extended = tf.concat([tensor, tf.fill(shape, blank)], 0)
            extended.set_shape(tensor.shape)
            mask = _keras.layers.get_mask(tensor)
            if mask is not None:
                _keras.layers.set_mask(
                    extended, tf.concat([mask, tf.fill([missing, *mask.shape[1:]], True)], 0)
                )
            return extended

        x, y, weights = (
            tf.nest.map_structure(filled, value) for value in (self.x, self.y, self.sample_weight)
        )
        return Data(x, y, weights, self.size + missing)

    def part(self, start: int | tf.Tensor, size: int | tf.Tensor) -> Data:
        """Returns the examples `start .. start + size - 1`."""
        if isinstance(start, int) and start == 0 and size is self.size:
            return self

        def cut(tensor: Any) -> Any:
            if tensor is None:
                return None
            piece = tensor[start : start + size]
            if isinstance(size, int) and isinstance(piece, tf.Tensor):
                piece.set_shape([size, *tensor.shape[1:]])
            mask = _keras.layers.get_mask(tensor)
            if mask is not None:
                _keras.layers.set_mask(piece, mask[start : start + size])
            return piece

        x, y, weights = (
            tf.nest.map_structure(cut, value) for value in (self.x, self.y, self.sample_weight)
        )
        return Data(x, y, weights, size)


def _numbers(value: Any) -> Any:
    """Converts lists of numbers to arrays. A list would otherwise be a structure of scalars."""
    if isinstance(value, Mapping):
        return {key: _numbers(inner) for key, inner in value.items()}
    numbers = isinstance(value, (list, tuple)) and value and all(np.isscalar(v) for v in value)
    return np.asarray(value) if numbers else value


def _tensor(name: str, value: Any) -> Any:
    if value is None or tf.is_tensor(value):
        return value
    if isinstance(value, (tf.data.Dataset, _keras.layers.Datasets, Iterator)):
        raise ValueError(
            f"{name} is a {type(value).__name__}, which yields batches: pass the x and y of one "
            "batch, for example from `x, y = next(iter(dataset))`"
        )
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} is, or contains, {value!r} of type {type(value).__name__}, which is not an "
            f"array or tensor: {error}"
        ) from error
    floating = tensor.dtype.is_floating and not isinstance(value, _keras.layers.KerasTensor)
    return tf.cast(tensor, keras.backend.floatx()) if floating else tensor


def _shown(tensor: tf.Tensor) -> str:
    return str(tensor.numpy()) if hasattr(tensor, "numpy") else repr(tensor)
