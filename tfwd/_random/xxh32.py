"""XXH32, the generator of large masks: a hash of an entry's number, keyed with the seed.

Entry number `i` of a draw depends only on the seed and on `i` (a counter-based generator). So some
rows of a large table can be drawn without the other rows, and a draw can be repeated anywhere.
XXH32, the 32-bit xxHash of Collet (2012), is a published hash with known quality and test vectors.
It takes a dozen integer operations per entry, which a compiler can vectorize.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

Shape = Any  # a static shape, or a 1-D integer tensor

_PRIMES = (2654435761, 2246822519, 3266489917, 668265263, 374761393)


def words(counters: Sequence[tf.Tensor], seed: tf.Tensor) -> tf.Tensor:
    """Returns independent uniform 32-bit words, one per counter.

    Formula: `XXH32(message = counter || seed[1], key = seed[0])`, all as little-endian 32-bit
    words.

    Args:
        counters: uint32 tensors that broadcast against one another. Their sum modulo 2^32 is the
            counter. So many counters need no large tensor.
        seed: int32 `[2]`, or int32 `[count, 2]` for the words of several seeds.

    Returns:
        uint32 of the broadcast shape. With several seeds, `count` is an additional first axis.

    Example:
        >>> words([tf.constant([0, 1], tf.uint32)], tf.constant([1, 2])).numpy().tolist()
        [179006902, 1412674086]

    References: Y. Collet, the xxHash specification (github.com/Cyan4973/xxHash).
    """
    key, tail = tf.unstack(tf.bitcast(seed, tf.uint32), axis=-1)
    if seed.shape.rank == 2:
        rank = max(counter.shape.rank for counter in counters)
        key, tail = (tf.reshape(half, [-1] + [1] * rank) for half in (key, tail))
    state = key + constant(_PRIMES[4] + 8)  # 8 is the message's length in bytes
    for counter in counters:
        state = state + counter * constant(_PRIMES[2])
    state = _rotate(state, 17) * constant(_PRIMES[3])
    state = _rotate(state + tail * constant(_PRIMES[2]), 17) * constant(_PRIMES[3])
    state = _fold_right(state, 15) * constant(_PRIMES[1])
    state = _fold_right(state, 13) * constant(_PRIMES[2])
    return _fold_right(state, 16)


def counters(shape: Shape, rows: tf.Tensor | None = None) -> list[tf.Tensor]:
    """Returns the numbers of a tensor's entries, or of the entries of some rows, as summands.

    The numbers are uint32 and wrap around. So in a tensor with more than 2^32 entries, two entries
    at a distance of 2^32 get the same draw.
    """
    if rows is not None:
        width = tuple(shape[1:])
        across = tf.reshape(_count(math.prod(width)), width)
        if shape[0] == 1:
            return [tf.reshape(across, (1,) * len(rows.shape) + width)]
        start = tf.cast(rows, tf.uint32) * constant(math.prod(width))
        return [tf.reshape(start, tf.concat([tf.shape(rows), [1] * len(width)], 0)), across]
    if tf.is_tensor(shape):
        return [tf.reshape(_count(tf.reduce_prod(tf.cast(shape, tf.int64))), shape)]
    # A compiled function stores its constants, so the constants should be short. There are two: the
    # numbers of the leading axes, and the numbers of the trailing axes.
    sizes = [math.prod(shape[:axis]) + math.prod(shape[axis:]) for axis in range(len(shape) + 1)]
    axis = sizes.index(min(sizes))
    leading, trailing = tuple(shape[:axis]), tuple(shape[axis:])
    start = _count(math.prod(leading)) * constant(math.prod(trailing))
    return [
        tf.reshape(start, leading + (1,) * len(trailing)),
        tf.reshape(_count(math.prod(trailing)), trailing),
    ]


def _count(size: int | tf.Tensor) -> tf.Tensor:
    if isinstance(size, int) and size < 1 << 31:
        return tf.bitcast(tf.range(size), tf.uint32)
    return tf.cast(tf.range(tf.cast(size, tf.int64)), tf.uint32)


def constant(value: int) -> tf.Tensor:
    """Returns the low 32 bits of an integer, as uint32."""
    return tf.constant(value & 0xFFFFFFFF, tf.uint32)


def _rotate(words: tf.Tensor, by: int) -> tf.Tensor:
    left = tf.bitwise.left_shift(words, constant(by))
    return tf.bitwise.bitwise_or(left, tf.bitwise.right_shift(words, constant(32 - by)))


def _fold_right(words: tf.Tensor, by: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, constant(by)))
