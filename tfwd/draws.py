"""Random masks and noise from a seed.

The keep probability is a multiple of 2^-16, so that a mask takes 16 random bits an entry and the
division by the keep probability makes the expectation exact, not nearly so.
"""

from __future__ import annotations

import tensorflow as tf

LEVELS = 1 << 16


def keep_probability(rate: float | tf.Tensor) -> float | tf.Tensor:
    """`1 - rate` as it is used: rounded to a multiple of 2^-16, and at least 2^-16.

    Args:
        rate: the drop rate, in [0, 1): a float or a scalar tensor.

    Returns:
        A float for a float, a float32 scalar for a tensor.

    Example:

    >>> keep_probability(0.5), keep_probability(0.3)
    (0.5, 0.6999969482421875)
    """
    if isinstance(rate, (int, float)):
        return min(max(round((1.0 - rate) * LEVELS), 1), LEVELS) / LEVELS
    levels = tf.round((1.0 - tf.cast(rate, tf.float32)) * LEVELS)
    return tf.clip_by_value(levels, 1.0, float(LEVELS)) / LEVELS


def mask(shape: tf.Tensor | tuple[int, ...], rate: float | tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """A boolean tensor whose entries are True with probability `keep_probability(rate)`.

    Args:
        shape: the mask's shape, static or a 1-D integer tensor.
        rate: the drop rate, a float or a scalar tensor.
        seed: int32 `[2]`.

    Returns:
        tf.bool of the given shape.

    Example:

    >>> mask((2, 3), 0.0, tf.constant([1, 2]))
    <tf.Tensor: shape=(2, 3), dtype=bool, numpy=
    array([[ True,  True,  True],
           [ True,  True,  True]])>
    """
    shape = tf.convert_to_tensor(shape, tf.int32) if not tf.is_tensor(shape) else shape
    size = tf.reduce_prod(shape)
    # One 32-bit draw serves two entries.
    words = tf.random.stateless_uniform(
        [(size + 1) // 2], seed=seed, minval=None, maxval=None, dtype=tf.int32, alg="philox"
    )
    bits = tf.reshape(tf.reshape(tf.bitcast(words, tf.uint16), [-1])[:size], shape)
    keep = keep_probability(rate)
    if isinstance(keep, float):
        last = tf.constant(round(keep * LEVELS) - 1, tf.uint16)
    else:
        last = tf.cast(tf.cast(keep * LEVELS, tf.int32) - 1, tf.uint16)
    return bits <= last


def drop(tensor: tf.Tensor, kept: tf.Tensor, rate: float | tf.Tensor) -> tf.Tensor:
    """`tensor / keep` where `kept`, exactly zero elsewhere.

    The division is made in float32 at least, and the result has the tensor's dtype. Its gradient is
    `upstream / keep` where kept and exactly 0.0 elsewhere.

    Args:
        tensor: a floating tensor.
        kept: tf.bool, of a shape that broadcasts to the tensor's.
        rate: the drop rate that `kept` was drawn with.

    Returns:
        A tensor of the first argument's shape and dtype.
    """
    keep = keep_probability(rate)
    wide = tensor.dtype if tensor.dtype.size >= 4 else tf.float32
    scaled = tf.cast(tensor, wide) / tf.cast(keep, wide)
    return tf.where(kept, tf.cast(scaled, tensor.dtype), tf.zeros([], tensor.dtype))


def normal(shape: tf.Tensor, dtype: tf.DType, seed: tf.Tensor) -> tf.Tensor:
    """Independent draws of N(0, 1) in the given dtype.

    Args:
        shape: static or a 1-D integer tensor.
        dtype: a floating dtype.
        seed: int32 `[2]`.

    Returns:
        A tensor of the given shape and dtype.
    """
    return tf.random.stateless_normal(shape, seed=seed, dtype=dtype, alg="philox")
