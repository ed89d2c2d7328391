"""TensorFlow's Philox 4x32-10: one operation draws many words, from a key and a counter.

It needs one node of a graph, or one eager call, for any number of words. Seeds and small masks use
it, because starting the many operations of XXH32 would take longer than the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfwd._graph.cached_constants import constant


def random_words(
    shape: Sequence[int] | tf.Tensor,
    key: tf.Tensor,
    counter: tf.Tensor,
    dtype: tf.DType = tf.int32,
) -> tf.Tensor:
    """Returns independent uniform integers.

    Formula: block `i`, of four 32-bit words, is `Philox(key, counter + i)`. The counter is a number
    of 128 bits. An integer of 64 bits consists of two words, low word first.

    Args:
        shape: Static shape, or a 1-D integer tensor.
        key: uint64 `[1]`.
        counter: uint64 `[2]`, the low and the high half.
        dtype: int32 or int64. All values of the dtype are equally likely. Default int32.

    Returns:
        A tensor of the given shape and dtype.

    Example:
        >>> key, counter = key_of(tf.constant([1, 2])), constant((0, 0), tf.uint64)
        >>> random_words([3], key, counter).numpy().tolist()
        [93904442, -1731035090, 655331230]

    References: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011). TensorFlow's
    `tf.random.stateless_*` functions compute key and counter from a seed with an additional block.
    """
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=shape if tf.is_tensor(shape) else constant(tuple(shape), tf.int32),
        key=key,
        counter=counter,
        alg=constant(tf.random.Algorithm.PHILOX.value, tf.int32),
        dtype=dtype,
    )


def key_of(seed: tf.Tensor) -> tf.Tensor:
    """Returns a seed, int32 `[2]`, as a key. The first word is the key's low half."""
    return tf.raw_ops.Bitcast(input=tf.raw_ops.Pack(values=[seed]), type=tf.uint64)
