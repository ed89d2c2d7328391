"""A batch, and parts of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras


class Data(NamedTuple):
    """Inputs, targets and sample weights: tensors in any nest, the examples along the first axis.

    Attributes:
        size: the number of examples, an int or a scalar tensor.
    """

    x: Any
    y: Any
    sample_weight: Any
    size: int | tf.Tensor

    @classmethod
    def of(cls, x: Any, y: Any, sample_weight: Any) -> Data:
        """Takes arrays for tensors, and finds the number of examples.

        Raises:
            ValueError: if there is no example, or not as many in each.
        """
        x, y, sample_weight = (
            keras.tree.map_structure(_tensor, value) for value in (x, y, sample_weight)
        )
        sizes: dict[str, Any] = {}
        for name, value in (("x", x), ("y", y), ("sample_weight", sample_weight)):
            for tensor in keras.tree.flatten(value):
                if tensor is None:
                    continue
                if tensor.shape.rank == 0:
                    raise ValueError(
                        f"{name} has no axis of examples: it is the scalar {tensor!r}; "
                        "x, y and sample_weight have the examples along their first axes"
                    )
                sizes.setdefault(name, tensor.shape[0])
                if tensor.shape[0] != sizes[name]:
                    raise ValueError(
                        f"{name} has tensors of {sizes[name]} and of {tensor.shape[0]} examples"
                    )
        if "x" not in sizes:
            raise ValueError("x is empty: give the inputs of the model")
        known = {name: count for name, count in sizes.items() if count is not None}
        if len(set(known.values())) > 1:
            shown = ", ".join(f"{count} in {name}" for name, count in known.items())
            raise ValueError(f"the numbers of examples differ: {shown}")
        if 0 in known.values():
            raise ValueError("the batch has no examples")
        first = next(t for t in keras.tree.flatten(x) if t is not None)
        count = next(iter(known.values()), None)
        return cls(x, y, sample_weight, tf.shape(first)[0] if count is None else count)

    def part(self, start: int | tf.Tensor, size: int | tf.Tensor) -> Data:
        """The examples `start .. start + size - 1`."""
        if isinstance(start, int) and start == 0 and size is self.size:
            return self

        def cut(tensor: Any) -> Any:
            if tensor is None:
                return None
            piece = tensor[start : start + size]
            if isinstance(size, int):
                piece.set_shape([size, *tensor.shape[1:]])
            mask = _keras.get_mask(tensor)
            if mask is not None:
                _keras.set_mask(piece, mask[start : start + size])
            return piece

        x, y, weights = (
            keras.tree.map_structure(cut, value) for value in (self.x, self.y, self.sample_weight)
        )
        return Data(x, y, weights, size)


def _tensor(value: Any) -> Any:
    if value is None or tf.is_tensor(value):
        return value
    tensor = tf.convert_to_tensor(value)
    floating = tensor.dtype.is_floating and not isinstance(value, keras.KerasTensor)
    return tf.cast(tensor, keras.config.floatx()) if floating else tensor
