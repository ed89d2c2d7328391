"""Dtypes for computation: float32 at least, because half precision is too coarse for sums."""

from __future__ import annotations

import tensorflow as tf


def wide(dtype: tf.DType) -> tf.DType:
    """Returns the dtype for computation: float32 for half precision, else the dtype itself.

    Example:
        >>> wide(tf.bfloat16).name, wide(tf.float64).name
        ('float32', 'float64')
    """
    return dtype if dtype.size >= 4 else tf.float32


def at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a half-precision tensor as float32, and any other tensor unchanged.

    Example:
        >>> at_least_float32(tf.constant(1.0, tf.bfloat16)).dtype.name
        'float32'
    """
    return tensor if tensor.dtype.size >= 4 else tf.cast(tensor, tf.float32)
