"""Random masks and normal numbers as pure functions of a seed and an entry's index.

There are two generators. A *small* draw has a static shape and fewer entries than `SMALL`. Its
words come from Philox, which is one operation of TensorFlow. Any other draw takes its words from
XXH32, which can be a part of a compiled loop (`dropout_and_noise`).

The keep probability is a multiple of 2^-16. Kept entries are divided by exactly that probability.
So the expectation is exact up to rounding, instead of up to 2^-16.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tfwd import dtypes
from tfwd._graph.cached_constants import constant
from tfwd._random import normals, philox_op, xxh32

LEVELS = 1 << 16

# A draw is small if it has fewer entries than this (256 kB of float32). For a small draw, one
# operation draws the mask, and the effective weight is stored for backward. Compared with the
# compiled loop and a second draw, this takes 0.5 of the time at 32,761 entries, 0.8 at 65,536, and
# 1.15 at 262,144 (benchmarks/mask_and_recompute_thresholds.py). Compilation also takes 0.1 s or
# more per size.
SMALL = 1 << 16


def keep_probability(rate: float | tf.Tensor) -> float | tf.Tensor:
    """Returns `1 - rate`, rounded to a multiple of 2^-16 and at least 2^-16.

    Args:
        rate: float or scalar tensor. Drop rate in [0, 1).

    Returns:
        A float for a float, a float32 scalar for a tensor. It is NaN if the rate is a tensor that
        is NaN. Then `dropout` and `mix` return NaN, and all entries of a mask are True.

    Example:
        >>> keep_probability(0.5), keep_probability(0.3)
        (0.5, 0.6999969482421875)
    """
    if isinstance(rate, (int, float)):
        return min(max(round((1.0 - rate) * LEVELS), 1), LEVELS) / LEVELS
    rate = tf.cast(rate, tf.float32)
    keep = tf.clip_by_value(tf.round((1.0 - rate) * LEVELS), 1.0, float(LEVELS)) / LEVELS
    return tf.where(tf.math.is_nan(rate), rate, keep)


def mask(shape: xxh32.Shape, rate: float | tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Returns a boolean tensor whose entries are True with probability `keep_probability(rate)`.

    Args:
        shape: Shape of the mask, static or a 1-D integer tensor.
        rate: float or scalar tensor. Drop rate.
        seed: int32 `[2]`.

    Returns:
        tf.bool of the given shape.

    Example:
        >>> mask((2, 3), 0.0, tf.constant([1, 2]))
        <tf.Tensor: shape=(2, 3), dtype=bool, numpy=
        array([[ True,  True,  True],
               [ True,  True,  True]])>
    """
    if is_small(shape):
        return small_mask(shape, keep_probability(rate), seed)
    return large_mask(xxh32.counters(shape), tf.cast(keep_probability(rate), tf.float32), seed)


def is_small(shape: xxh32.Shape) -> bool:
    """Returns True if a mask or noise of the shape is a small draw."""
    if isinstance(shape, (list, tuple)):
        return None not in shape and math.prod(shape) < SMALL
    size = shape.num_elements() if isinstance(shape, tf.TensorShape) else None
    return size is not None and size < SMALL


def normal(shape: xxh32.Shape, dtype: tf.DType, seed: tf.Tensor) -> tf.Tensor:
    """Returns independent draws of N(0, 1) in the given dtype.

    Formula: a small draw uses the formula of Box and Muller (1958). Its largest draw is 6.7. Any
    other draw uses the inverse of the normal distribution function, at the middle of one of 2^32
    equal intervals. In float64 there are 2^64 intervals, and the draws reach further. In float32 it
    uses the polynomials of Giles (2010). They are evaluated at the distance from the nearer end, so
    the tails are nearly as precise as the middle. The largest draw in float32 is 6.2.

    Args:
        shape: Static shape, or a 1-D integer tensor.
        dtype: Floating dtype.
        seed: int32 `[2]`.

    Returns:
        A tensor of the given shape and dtype.

    References: G. E. P. Box and M. E. Muller, "A Note on the Generation of Random Normal Deviates"
    (1958); M. Giles, "Approximating the erfinv function" (2010).
    """
    wide = dtypes.wide(dtype)
    if is_small(shape):
        return tf.cast(small_normal(shape, wide, seed), dtype)
    return tf.cast(large_normal(xxh32.counters(shape), wide, seed), dtype)


def _small_words(shape: xxh32.Shape, seed: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return philox_op.random_words(shape, philox_op.key_of(seed), constant((0, 0), tf.uint64), dtype)


def small_mask(shape: xxh32.Shape, keep: float | tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Returns the mask of a small draw, for a keep probability."""
    # The smallest word is -2^31. The largest word that keeps an entry is keep * 2^32 - 1 above it.
    if isinstance(keep, float):
        last = constant(round(keep * LEVELS) * LEVELS - (1 << 31) - 1, tf.int32)
    else:
        levels = tf.cast(_levels(keep), tf.int64)
        last = tf.cast(levels * LEVELS - (1 << 31) - 1, tf.int32)
    return tf.raw_ops.LessEqual(x=_small_words(shape, seed, tf.int32), y=last)


def small_normal(shape: xxh32.Shape, dtype: tf.DType, seed: tf.Tensor) -> tf.Tensor:
    """Returns the normal numbers of a small draw, in a dtype that `dtypes.wide` returns."""
    words = _small_words((2, *shape), seed, tf.int64 if dtype == tf.float64 else tf.int32)
    return normals.box_muller(*tf.raw_ops.Unpack(value=words, num=2))


def large_mask(counters: list[tf.Tensor], keep: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Returns the mask of a large draw.

    Args:
        counters: Numbers of the entries, from `xxh32.counters`.
        keep: float32 scalar. Keep probability.
        seed: int32 `[2]`, or `[count, 2]` for the masks of several seeds along a first axis.
    """
    # Signed numbers, because more processors can compare vectors of signed numbers.
    levels = tf.bitcast(
        tf.bitwise.right_shift(xxh32.words(counters, seed), xxh32.constant(16)), tf.int32
    )
    return levels < tf.cast(_levels(keep), tf.int32)


def _levels(keep: tf.Tensor) -> tf.Tensor:
    """Returns the number of levels that keep an entry: all levels if the probability is NaN."""
    return tf.where(tf.math.is_nan(keep), float(LEVELS), keep * LEVELS)


def large_normal(counters: list[tf.Tensor], dtype: tf.DType, seed: tf.Tensor) -> tf.Tensor:
    """Returns the normal numbers of a large draw, in a dtype that `dtypes.wide` returns.

    Args:
        counters: Numbers of the entries, from `xxh32.counters`.
        dtype: dtype of the numbers.
        seed: int32 `[2]`.
    """
    high, low = xxh32.words(counters, seed), None
    if dtype == tf.float64:
        low = xxh32.words(counters, tf.bitwise.bitwise_xor(seed, [0, -1]))
    return normals.inverted(high, low)
