"""Flattens and repacks what a layer takes and returns, dataclasses included.

`tf.nest` knows lists, tuples, dicts, attrs and dataclasses that define `__tf_flatten__`. Here other
dataclasses are opened too, field by field: a tensor that stays hidden in an object would be no
result of the function that a gradient is taken through, and would have none.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfwd import _keras


def flatten(nest: Any) -> list[Any]:
    """The leaves of a nest in the order of `tf.nest`; a composite tensor is one leaf."""
    leaves: list[Any] = []
    for leaf in tf.nest.flatten(nest):
        if _is_opened(leaf):
            for name in _fields(leaf):
                leaves += flatten(getattr(leaf, name))
        else:
            leaves.append(leaf)
    return leaves


def pack(nest: Any, leaves: Iterator[Any]) -> Any:
    """The same nest with other leaves."""
    flat = [
        _with_fields(leaf, leaves) if _is_opened(leaf) else next(leaves)
        for leaf in tf.nest.flatten(nest)
    ]
    return tf.nest.pack_sequence_as(nest, flat)


def components(leaf: Any) -> list[tf.Tensor]:
    """The tensors that a tensor is made of: of a sparse or ragged one several."""
    if isinstance(leaf, tf.Variable):
        return [tf.convert_to_tensor(leaf)]
    parts = tf.nest.flatten(leaf, expand_composites=True)
    return [tf.convert_to_tensor(part) for part in parts]


def composed(leaf: Any, parts: Iterator[tf.Tensor]) -> Any:
    """A tensor like `leaf`, made of the next of these components."""
    if not isinstance(leaf, tf.__internal__.CompositeTensor) or isinstance(leaf, tf.Variable):
        return next(parts)
    count = len(tf.nest.flatten(leaf, expand_composites=True))
    given = [next(parts) for _ in range(count)]
    return tf.nest.pack_sequence_as(leaf, given, expand_composites=True)


def closed(nest: Any) -> str:
    """The class of an object in a nest that holds tensors and cannot be opened; empty for none."""
    for leaf in flatten(nest):
        if (
            tf.is_tensor(leaf)
            or _keras.variables.is_variable(leaf)
            or not hasattr(leaf, "__dict__")
        ):
            continue
        held = [item for value in vars(leaf).values() for item in tf.nest.flatten(value)]
        if any(map(tf.is_tensor, held)):
            return type(leaf).__name__
    return ""


def _is_opened(leaf: Any) -> bool:
    """Whether it is a dataclass that `tf.nest` takes for a leaf."""
    return (
        dataclasses.is_dataclass(leaf)
        and not isinstance(leaf, type)
        and not tf.is_tensor(leaf)
        and not isinstance(leaf, tf.Module)
    )


def _fields(instance: Any) -> list[str]:
    """The names of the fields that a dataclass has values for."""
    names = [field.name for field in dataclasses.fields(instance)]
    return [name for name in names if hasattr(instance, name)]


def _with_fields(instance: Any, leaves: Iterator[Any]) -> Any:
    """A copy of a dataclass with other leaves; its constructor does not run again."""
    other = copy.copy(instance)
    for name in _fields(instance):
        # Past the assignment of a frozen class.
        object.__setattr__(other, name, pack(getattr(instance, name), leaves))
    # To Keras the instance is a leaf, which it gives a mask: that of the first instance.
    if _keras.layers.get_mask(other) is not None:
        _keras.layers.set_mask(other, None)
    return other
