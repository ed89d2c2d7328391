"""Rule of the activation functions of layers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd.pretrained.flatten_order.layer_call import Call
from tfwd.pretrained.flatten_order.made_axes import dependent_axis
from tfwd.pretrained.flatten_order.normalizations import after_softmax
from tfwd.pretrained.flatten_order.tensor_axes import TensorAxes

_SHAPE = (2, 3, 4, 5)  # of the numbers on which a user's function is tried


def after_activation(call: Call, result: TensorAxes) -> TensorAxes:
    """Returns the first output of a layer, after its activation function.

    The order of the entries is known only if the function treats all entries alike.
    """
    function: Any = call.layer
    if not isinstance(function, keras.layers.Softmax):
        function = getattr(call.layer, "activation", None)
    result = after_softmax(call, result, function)
    if function is call.layer or function is None or _treats_entries_alike(function):
        return result
    reason = f"'{call.name}' has an activation function that may reorder features"
    axes = tuple(
        axis
        if axis is None or axis.find() is call.batch
        else dependent_axis(axis.size, [axis], reason)
        for axis in result.axes
    )
    return dataclasses.replace(result, axes=axes)


def _treats_entries_alike(function: Any) -> bool:
    """Returns True if a function of permuted entries has permuted results, along each axis."""
    name = getattr(function, "__name__", "")
    if function is getattr(keras.activations, name, None):
        return True
    try:
        return _commutes_with_permutations(function)
    except Exception:  # such as a function that needs other shapes
        return False


@functools.lru_cache(maxsize=256)
def _commutes_with_permutations(function: Any) -> bool:
    generator = np.random.default_rng(0)
    values = generator.normal(size=_SHAPE).astype("float32")
    with tf.init_scope():
        results = np.asarray(function(tf.constant(values)))
        for axis, size in enumerate(_SHAPE):
            order = np.roll(generator.permutation(size), 1)
            permuted = np.asarray(function(tf.constant(np.take(values, order, axis))))
            expected = np.take(results, order, axis)
            if results.shape != _SHAPE or not np.allclose(permuted, expected, 1e-4, 1e-5):
                return False
    return True
