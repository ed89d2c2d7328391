"""Operations of `keras.ops` as Keras's layers compute them, because Keras 2 has no `keras.ops`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

add = tf.add
einsum = tf.einsum
not_equal = tf.not_equal
shape = tf.shape


def convert_to_tensor(value: Any, dtype: Any = None) -> tf.Tensor:
    """Returns the value as a tensor, cast to a dtype if needed."""
    tensor = tf.convert_to_tensor(value)
    return tensor if dtype is None else tf.cast(tensor, dtype)


def matmul(x1: tf.Tensor, x2: tf.Tensor) -> tf.Tensor:
    """Returns a product along the last axis, as `keras.layers.Dense` computes it."""
    if x1.shape.rank == 2:
        return tf.matmul(x1, x2)
    return tf.tensordot(x1, x2, 1)


def take(table: tf.Tensor, indices: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns slices of a tensor along an axis."""
    if axis == 0:
        return tf.nn.embedding_lookup(table, indices)
    return tf.gather(table, indices, axis=axis)
