"""Flattens and repacks arguments and results of layers, dataclasses included.

`tf.nest` supports lists, tuples, dicts, attrs and dataclasses that define `__tf_flatten__`. This
module also opens other dataclasses, field by field. A tensor that stayed hidden in an object would
not be a result of the differentiated function, and would get no gradient.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfwd import _keras


def flatten(nest: Any) -> list[Any]:
    """Returns the leaves of a nest in the order of `tf.nest`. A composite tensor is one leaf."""
    leaves: list[Any] = []
    for leaf in tf.nest.flatten(nest):
        if _is_opened(leaf):
            for name in _fields(leaf):
                leaves += flatten(getattr(leaf, name))
        else:
            leaves.append(leaf)
    return leaves


def pack(nest: Any, leaves: Iterator[Any]) -> Any:
    """Returns the same nest with other leaves."""
    flat = [
        _with_fields(leaf, leaves) if _is_opened(leaf) else next(leaves)
        for leaf in tf.nest.flatten(nest)
    ]
    return tf.nest.pack_sequence_as(nest, flat)


def components(leaf: Any) -> list[tf.Tensor]:
    """Returns the component tensors: several for a sparse or ragged tensor, else one."""
    if isinstance(leaf, tf.Variable):
        return [tf.convert_to_tensor(leaf)]
    parts = tf.nest.flatten(leaf, expand_composites=True)
    return [tf.convert_to_tensor(part) for part in parts]


def compose(leaf: Any, parts: Iterator[tf.Tensor]) -> Any:
    """Returns a tensor like `leaf` that is made of the next component tensors."""
    if not isinstance(leaf, tf.__internal__.CompositeTensor) or isinstance(leaf, tf.Variable):
        return next(parts)
    count = len(tf.nest.flatten(leaf, expand_composites=True))
    given = [next(parts) for _ in range(count)]
    return tf.nest.pack_sequence_as(leaf, given, expand_composites=True)


def opaque_class(nest: Any) -> str:
    """Returns the class of an object that hides tensors and cannot be opened, or ""."""
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
    """Returns True for a dataclass that `tf.nest` treats as a leaf."""
    return (
        dataclasses.is_dataclass(leaf)
        and not isinstance(leaf, type)
        and not tf.is_tensor(leaf)
        and not isinstance(leaf, tf.Module)
    )


def _fields(instance: Any) -> list[str]:
    """Returns the names of the fields that have a value."""
    names = [field.name for field in dataclasses.fields(instance)]
    return [name for name in names if hasattr(instance, name)]


def _with_fields(instance: Any, leaves: Iterator[Any]) -> Any:
    """Returns a copy of a dataclass with other leaves. Its constructor does not run again."""
    other = copy.copy(instance)
    for name in _fields(instance):
        # `object.__setattr__` also works on a frozen class.
        object.__setattr__(other, name, pack(getattr(instance, name), leaves))
    # Keras treats the instance as a leaf and gives it a mask. The copy has the first instance's
    # mask.
    if _keras.layers.get_mask(other) is not None:
        _keras.layers.set_mask(other, None)
    return other
