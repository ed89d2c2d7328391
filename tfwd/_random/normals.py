"""Standard normal numbers from uniform words, with two formulas."""

from __future__ import annotations

import math

import tensorflow as tf


def box_muller(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    """Computes `sqrt(-2 log u) cos(v)`: `u` in (0, 1) from the first word, `v` from the second.

    It takes a logarithm, a root, a cosine and ten more operations. XLA supports all of them.

    Args:
        first, second: int32 words, for float32; or int64 words, for float64.

    Returns:
        float32 or float64 of the words' shape.

    References: G. E. P. Box and M. E. Muller, "A Note on the Generation of Random Normal Deviates"
    (1958).
    """
    bits, dtype = (63, tf.float64) if first.dtype == tf.int64 else (31, tf.float32)
    # Without its sign bit, a small word converts to a float exactly. The tails need small words.
    rest = tf.bitwise.bitwise_and(first, tf.constant((1 << bits) - 1, first.dtype))
    radius = tf.sqrt(-2.0 * tf.math.log((tf.cast(rest, dtype) + 0.5) * 2.0**-bits))
    return radius * tf.cos(tf.cast(second, dtype) * (math.pi * 2.0**-bits))


def inverted(high: tf.Tensor, low: tf.Tensor | None = None) -> tf.Tensor:
    """Returns the inverse normal distribution function at the middle of a word's interval.

    Args:
        high: uint32 words.
        low: uint32. Lower 32 bits of each word, for float64. Default None, for float32.

    Returns:
        float32 of the words' shape, or float64 if `low` is given.

    References: M. Giles, "Approximating the erfinv function" (2010), for float32.
    """
    one = tf.constant(1, tf.uint32)
    # One bit is the sign. The other bits select one of 2^31 intervals of the half line.
    rest = tf.bitwise.right_shift(high, one)
    if low is not None:
        position = tf.cast(rest, tf.float64) + (tf.cast(low, tf.float64) + 0.5) * 2.0**-32
        size = -tf.math.ndtri(position * 2.0**-32)
    else:
        size = half_normal((tf.cast(tf.bitcast(rest, tf.int32), tf.float32) + 0.5) * 2.0**-31)
    odd = tf.bitcast(tf.bitwise.bitwise_and(high, one), tf.int32) > 0
    return tf.where(odd, -size, size)


# Giles (2010), table 5: float32, for w < 5 and for w >= 5, highest power first.
_CENTRE = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
    -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


def half_normal(tail: tf.Tensor) -> tf.Tensor:
    """Returns the value that |N(0, 1)| exceeds with the probability `tail`, in float32."""
    w = -tf.math.log(tail * (2.0 - tail))
    central = w < 5.0
    t = tf.where(central, w - 2.5, tf.sqrt(w) - 3.0)
    p = tf.zeros([], tf.float32)
    for centre, end in zip(_CENTRE, _TAIL, strict=True):
        p = tf.where(central, centre, end) + p * t
    return p * (1.0 - tail) * math.sqrt(2.0)
