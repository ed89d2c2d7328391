"""Constants that each graph creates only once, and then takes from a cache."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

_CONSTANTS = "_tfwd_constants"  # attribute of a graph: the constants that were created in it


def constant(value: Any, dtype: tf.DType) -> tf.Tensor:
    """Returns `tf.constant(value, dtype)`: one tensor per graph, and one for eager mode.

    Args:
        value: Number or tuple of numbers.
        dtype: dtype of the tensor.
    """
    if tf.executing_eagerly():
        return _made(value, dtype)
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, _CONSTANTS):
        setattr(graph, _CONSTANTS, {})
    known = getattr(graph, _CONSTANTS)
    if (value, dtype) not in known:
        with graph.control_dependencies(
            None
        ):  # other users must not wait for this place's dependencies
            known[value, dtype] = tf.constant(value, dtype)
    return known[value, dtype]


_made = functools.lru_cache(1024)(tf.constant)
