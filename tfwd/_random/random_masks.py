"""Random masks and normal numbers as pure functions of a seed and an entry's index.

There are two ways to draw. A *small* draw has a static shape and fewer entries than `SMALL`. Its
words come from Philox, which is one operation of TensorFlow. Any other draw takes its words from
XXH32, which can be a part of a compiled loop (`dropout_and_noise`).

The keep probability is a multiple of 2^-16. Kept entries are divided by exactly that probability.
So the expectation is right up to rounding, and not only up to 2^-16.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tfwd import dtypes
from tfwd._graph.constants import constant
from tfwd._random import normals, philox, xxh32

LEVELS = 1 << 16

# A draw is small if it has fewer entries than this (256 kB of float32). Then a training step is
# faster if one operation draws the mask and the effective weight is stored for backward. Compared
# with the compiled loop and a second draw it takes 0.5 of the time at 32,761 entries, 0.8 at
# 65,536, and 1.15 at 262,144 (benchmarks/small_weights.py). Compilation also takes 0.1 s or more
# per size.
SMALL = 1 << 16


def keep_probability(rate: float | tf.Tensor) -> float | tf.Tensor:
    """Returns `1 - rate`, rounded to a multiple of 2^-16 and at least 2^-16.

    Args:
        rate: float or scalar tensor. Drop rate in [0, 1).

    Returns:
        A float for a float, a float32 scalar for a tensor. It is NaN for a tensor that is NaN: then
        `dropout`, `mix` and `noise` return NaN, and a mask is True.

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
<<<<<<< HEAD
        return small_mask(shape, keep_probability(rate), seed)
    return large_mask(xxh32.counters(shape), tf.cast(keep_probability(rate), tf.float32), seed)
=======
        return _small_kept(shape, keep_probability(rate), seed)
    return kept_entries(xxh32.counters(shape), tf.cast(keep_probability(rate), tf.float32), seed)
>>>>>>> 39331c8d91f39c09db476a77f0c24841e1f248ad


def is_small(shape: xxh32.Shape) -> bool:
    """Returns True if a mask or noise of the shape is a small draw."""
    if isinstance(shape, (list, tuple)):
        return None not in shape and math.prod(shape) < SMALL
    size = shape.num_elements() if isinstance(shape, tf.TensorShape) else None
    return size is not None and size < SMALL


<<<<<<< HEAD
=======
def drop(tensor: tf.Tensor, kept: tf.Tensor, rate: float | tf.Tensor) -> tf.Tensor:
    """Returns `tensor * (1 / keep)` where `kept` is True, and exactly zero elsewhere.

    The product is computed in float32 at least, and the result has the tensor's dtype. Its gradient
    is `upstream * (1 / keep)` where kept, and exactly 0.0 elsewhere.

    Args:
        tensor: Floating tensor.
        kept: tf.bool, of a shape that broadcasts to the tensor's.
        rate: float or scalar tensor. Drop rate with which `kept` was drawn.

    Returns:
        A tensor of the first argument's shape and dtype.
    """
    return drop_entries(tensor, kept, tf.cast(keep_probability(rate), tf.float32))


def dropout(
    tensor: tf.Tensor,
    rate: float | tf.Tensor,
    seed: tf.Tensor,
    noise_shape: xxh32.Shape | None = None,
    rows: tf.Tensor | None = None,
) -> tf.Tensor:
    """Computes `drop(tensor, mask(noise_shape, rate, seed), rate)` without storing a large mask.

    Its gradient is the same function of the upstream gradient, with the same seed. In a branch of a
    `tf.cond`, TensorFlow cannot compute such a gradient for a tape outside. There it stores the
    mask.

    Args:
        tensor: Floating tensor.
        rate: float or scalar tensor. Drop rate in [0, 1).
        seed: int32 `[2]`.
        noise_shape: Shape of the mask, which broadcasts to the tensor's. Default None, for the
            tensor's shape.
        rows: Integers `[...]`. Indices of rows, if the tensor has rows of a table and the shape
            `rows.shape + width`. Each row gets the draw that it would get in the table.
            `noise_shape` must then be given, and is the table's. Default None.

    Returns:
        A tensor of the first argument's shape and dtype.

    Example:
        >>> table, ids, seed = tf.ones([5, 4]), tf.constant([3, 1]), tf.constant([1, 2])
        >>> rows = dropout(tf.gather(table, ids), 0.5, seed, table.shape, ids)
        >>> bool(tf.reduce_all(rows == tf.gather(dropout(table, 0.5, seed), ids)))
        True
    """
    shape = tensor.shape if noise_shape is None else noise_shape
    if is_small(shape):
        keep = keep_probability(rate)
        return _small_drop(tensor, _of_rows(_small_kept(shape, keep, seed), rows), keep)
    keep = tf.cast(keep_probability(rate), tf.float32)
    if graphs.in_branch():
        return _run(_dropout, tensor, tf.stop_gradient(keep), seed, rows, noise_shape)

    return _linear(tensor, keep, seed, rows, noise_shape)


def mix(
    tensor: tf.Tensor,
    reference: tf.Tensor,
    rate: float | tf.Tensor,
    seed: tf.Tensor,
    noise_shape: xxh32.Shape | None = None,
    rows: tf.Tensor | None = None,
) -> tf.Tensor:
    """Computes `reference + dropout(tensor - reference, ...)`, in one pass and rounded once.

    Its gradient for the tensor is the gradient of `dropout`. The reference has no gradient.

    Args:
        tensor: Floating tensor.
        reference: Floating tensor of the same shape.
        rate, seed, noise_shape, rows: As in `dropout`.

    Returns:
        A tensor of the first argument's shape and dtype. If the rate is 0 it is the tensor, bit for
        bit.

    Example:
        >>> mixed = mix(tf.fill([4], 3.0), tf.ones([4]), 0.5, tf.constant([1, 2]))
        >>> sorted(set(mixed.numpy().tolist()))
        [1.0, 5.0]
    """
    shape = tensor.shape if noise_shape is None else noise_shape
    reference = tf.stop_gradient(reference)
    if is_small(shape):
        keep = keep_probability(rate)
        kept = _of_rows(_small_kept(shape, keep, seed), rows)
        wide = dtypes.wide(tensor.dtype)
        start = tf.cast(reference, wide)
        moved = start + _small_drop(tf.cast(tensor, wide) - start, kept, keep)
        result = tf.cast(moved, tensor.dtype)
        return result if isinstance(keep, float) else tf.where(keep >= 1.0, tensor, result)
    keep = tf.cast(keep_probability(rate), tf.float32)
    if graphs.in_branch():
        return _run(_mix, tensor, tf.stop_gradient(keep), seed, rows, noise_shape, reference)

    @custom_gradient
    def mixed(tensor: tf.Tensor, reference: tf.Tensor, keep: tf.Tensor, seed: tf.Tensor) -> Any:
        def backward(upstream: Any) -> tuple:
            return _linear_backward(upstream, keep, seed, rows, noise_shape), None, None, None

        return _run(_mix, tensor, keep, seed, rows, noise_shape, reference), backward

    return mixed(tensor, reference, keep, seed)


def noise(
    tensor: tf.Tensor,
    stddev: float | tf.Tensor,
    seed: tf.Tensor,
    rows: tf.Tensor | None = None,
    shape: xxh32.Shape | None = None,
) -> tf.Tensor:
    """Computes `tensor + stddev * e` with `e ~ N(0, I)`, without storing the noise.

    Its gradient is the upstream gradient. If `stddev` is 0 the result is the tensor, bit for bit.

    Args:
        tensor: Floating tensor.
        stddev: float or scalar tensor. Standard deviation.
        seed: int32 `[2]`.
        rows: As in `dropout`.
        shape: Shape of the table, if `rows` is given. Default None.

    Returns:
        A tensor of the first argument's shape and dtype.

    Example:
        >>> x = noise(tf.zeros([1000]), 0.1, tf.constant([1, 2]))
        >>> round(float(tf.math.reduce_std(x)), 2)
        0.1
    """
    wide = dtypes.wide(tensor.dtype)
    if is_small(tensor.shape if shape is None else shape):
        drawn = _of_rows(_small_normal(tensor.shape if shape is None else shape, wide, seed), rows)
        shift = drawn * tf.cast(stddev, wide)
        noisy = tf.cast(tf.cast(tensor, wide) + shift, tensor.dtype)
        if isinstance(stddev, (int, float)) and stddev > 0:
            return noisy
        # Adding 0.0 would turn -0.0 into 0.0.
        return tf.where(tf.cast(stddev, wide) <= 0, tensor, noisy)
    stddev = tf.cast(stddev, wide)
    if graphs.in_branch():
        return _run(_noise, tensor, tf.stop_gradient(stddev), seed, rows, None)

    @custom_gradient
    def shifted(tensor: tf.Tensor, stddev: tf.Tensor, seed: tf.Tensor) -> Any:
        result = _run(_noise, tensor, stddev, seed, rows, None)
        return result, lambda upstream: (upstream, None, None)

    return shifted(tensor, stddev, seed)


>>>>>>> 39331c8d91f39c09db476a77f0c24841e1f248ad
def normal(shape: xxh32.Shape, dtype: tf.DType, seed: tf.Tensor) -> tf.Tensor:
    """Returns independent draws of N(0, 1) in the given dtype.

    Formula: a small draw uses the formula of Box and Muller (1958). Its largest draw is 6.7. Any
    other draw uses the inverse of the normal distribution function, at the middle of one of 2^32
    equal intervals (of 2^64 in float64, where the draws reach further). In single precision its
    polynomials are those of Giles (2010). They are evaluated at the distance from the nearer end,
    so the tails are nearly as precise as the middle. The largest draw in single precision is 6.2.

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
    return philox.words(shape, philox.key_of(seed), constant((0, 0), tf.uint64), dtype)


def small_mask(shape: xxh32.Shape, keep: float | tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Returns the mask of a small draw, for a keep probability."""
    # Words begin at -2^31. The last word that keeps is keep * 2^32 - 1 above.
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

<<<<<<< HEAD
    Args:
        counters: Numbers of the entries, from `xxh32.counters`.
        keep: float32 scalar. Keep probability.
        seed: int32 `[2]`.
=======

def kept_entries(counters: list[tf.Tensor], keep: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Returns a mask that draws from XXH32, whatever its size.

    Args:
        counters: Numbers of the entries, as `xxh32.counters` returns them.
        keep: float32 scalar. Keep probability.
        seed: int32 `[2]`, or `[count, 2]` for the masks of several seeds along a first axis.
>>>>>>> 39331c8d91f39c09db476a77f0c24841e1f248ad
    """
    # Signed numbers, because more processors can compare vectors of these.
    levels = tf.bitcast(
        tf.bitwise.right_shift(xxh32.words(counters, seed), xxh32.constant(16)), tf.int32
    )
    return levels < tf.cast(_levels(keep), tf.int32)


def _levels(keep: tf.Tensor) -> tf.Tensor:
    """Returns how many levels keep an entry: all if the probability is NaN, which propagates."""
    return tf.where(tf.math.is_nan(keep), float(LEVELS), keep * LEVELS)


def large_normal(counters: list[tf.Tensor], dtype: tf.DType, seed: tf.Tensor) -> tf.Tensor:
    """Returns the normal numbers of a large draw, in a dtype that `dtypes.wide` returns.

<<<<<<< HEAD
    Args:
        counters: Numbers of the entries, from `xxh32.counters`.
        dtype: dtype of the numbers.
        seed: int32 `[2]`.
    """
=======

def drop_entries(tensor: tf.Tensor, kept: tf.Tensor, keep: tf.Tensor) -> tf.Tensor:
    """Computes `drop` with a float32 keep probability in place of the rate."""
    wide = dtypes.wide(tensor.dtype)
    scaled = tf.cast(tensor, wide) * _scale(keep, wide)
    return tf.where(kept, tf.cast(scaled, tensor.dtype), tf.zeros([], tensor.dtype))


def _small_drop(tensor: tf.Tensor, kept: tf.Tensor, keep: float | tf.Tensor) -> tf.Tensor:
    """Computes `drop_entries`. Its gradient by TensorFlow is one product with the same factors."""
    wide = dtypes.wide(tensor.dtype)
    factors = tf.raw_ops.Mul(x=tf.raw_ops.Cast(x=kept, DstT=wide), y=_scale(keep, wide))
    dropped = tf.raw_ops.MulNoNan(x=tf.cast(tensor, wide), y=factors)
    return tf.cast(dropped, tensor.dtype)


def _dropout(
    tensor: tf.Tensor,
    keep: tf.Tensor,
    seed: tf.Tensor,
    rows: tf.Tensor | None,
    shape: xxh32.Shape | None,
) -> tf.Tensor:
    shape = _shape_of(tensor, rows) if shape is None else shape
    return drop_entries(tensor, kept_entries(xxh32.counters(shape, rows), keep, seed), keep)


def _linear(
    tensor: tf.Tensor,
    keep: tf.Tensor,
    seed: tf.Tensor,
    rows: tf.Tensor | None,
    noise_shape: xxh32.Shape | None,
) -> tf.Tensor:
    """Computes `_dropout`, with a gradient that draws again."""

    @custom_gradient
    def linear(tensor: tf.Tensor, keep: tf.Tensor, seed: tf.Tensor) -> Any:
        def backward(upstream: Any) -> tuple:
            return _linear_backward(upstream, keep, seed, rows, noise_shape), None, None

        return _run(_dropout, tensor, keep, seed, rows, noise_shape), backward

    return linear(tensor, keep, seed)


def _linear_backward(
    upstream: Any,
    keep: tf.Tensor,
    seed: tf.Tensor,
    rows: tf.Tensor | None,
    noise_shape: xxh32.Shape | None,
) -> tf.Tensor:
    upstream = tf.convert_to_tensor(upstream)
    late = seed
    if not _is_compiled(upstream, rows, noise_shape):
        (late,) = waiting.seeds_after([seed], [upstream])  # otherwise the mask would be stored
    return _linear(upstream, keep, late, rows, noise_shape)


def _mix(
    tensor: tf.Tensor,
    keep: tf.Tensor,
    seed: tf.Tensor,
    rows: tf.Tensor | None,
    shape: xxh32.Shape | None,
    reference: tf.Tensor,
) -> tf.Tensor:
    shape = _shape_of(tensor, rows) if shape is None else shape
    kept = kept_entries(xxh32.counters(shape, rows), keep, seed)
    wide = dtypes.wide(tensor.dtype)
    start = tf.cast(reference, wide)
    moved = start + (tf.cast(tensor, wide) - start) * _scale(keep, wide)
    mixed = tf.cast(tf.where(kept, moved, start), tensor.dtype)
    return tf.where(keep >= 1.0, tensor, mixed)


def _noise(
    tensor: tf.Tensor,
    stddev: tf.Tensor,
    seed: tf.Tensor,
    rows: tf.Tensor | None,
    shape: xxh32.Shape | None,
) -> tf.Tensor:
    counters = xxh32.counters(_shape_of(tensor, rows), rows)
    wide = stddev.dtype
    noisy = tf.cast(tensor, wide) + stddev * _normal(counters, wide, seed)
    # Adding 0.0 would turn -0.0 into 0.0.
    return tf.where(stddev <= 0, tensor, tf.cast(noisy, tensor.dtype))


def _shape_of(tensor: tf.Tensor, rows: tf.Tensor | None) -> xxh32.Shape:
    if rows is not None:
        return (None, *tensor.shape[len(rows.shape) :])
    return tuple(tensor.shape) if tensor.shape.is_fully_defined() else tf.shape(tensor)


def _normal(counters: list[tf.Tensor], dtype: tf.DType, seed: tf.Tensor) -> tf.Tensor:
>>>>>>> 39331c8d91f39c09db476a77f0c24841e1f248ad
    high, low = xxh32.words(counters, seed), None
    if dtype == tf.float64:
        low = xxh32.words(counters, tf.bitwise.bitwise_xor(seed, [0, -1]))
    return normals.inverted(high, low)
