"""Constants that each graph creates only once, and then takes from a cache."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

_CONSTANTS = "_tfwd_constants"  # attribute of a graph that holds its cached constants


def constant(value: Any, dtype: tf.DType) -> tf.Tensor:
    """Returns `tf.constant(value, dtype)`, with one tensor per graph, and one for eager mode.

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
        # Later users of the constant must not wait for the current control dependencies.
        with graph.control_dependencies(None):
            known[value, dtype] = tf.constant(value, dtype)
    return known[value, dtype]


_made = functools.lru_cache(1024)(tf.constant)
