"""Losses are computed in float32 at least, whatever the layers compute in."""

from __future__ import annotations

import tensorflow as tf


def at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    """A half-precision tensor as float32; any other as it is.

    Example:
        >>> at_least_float32(tf.constant(1.0, tf.bfloat16)).dtype.name
        'float32'
    """
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
