"""Stateless seeds: pure functions of a root seed, a position, a call and a replica.

A draw is a pure function of the layer's root seed, the weight's position in the layer, the number
of the call and the replica. Names play no part: Keras numbers them by what was built before. Since
nothing else enters, the same draw can be made again at any time: in backward, after a restart, or
when a function is traced anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# With which TensorFlow makes a key and a counter of a seed.
_SCRAMBLE = 0x02461E293EC8F720


def fold(seed: tf.Tensor, high: tf.Tensor | int, low: tf.Tensor | int) -> tf.Tensor:
    """Mixes two integers into a seed.

    `fold(s, a, b) = Philox(key = s xor [a, b])`, the first 64 bits of the keyed block function, so
    that chains of folds are a keyed hash of all that was folded in (CBC-MAC).

    Args:
        seed: int32 `[2]`.
        high, low: integers; 32 bits of each are used.

    Returns:
        int32 `[2]`.
    """
    return _folded(seed, _number(high), _number(low))


def seed(
    root: tf.Tensor | int, position: int, call: tf.Tensor | int, replica: tf.Tensor | int = 0
) -> tf.Tensor:
    """The seed of one weight's draw in one training call.

    Formula: `fold(fold(fold(0, root), position, replica), call)`, each integer as 64 bits where it
    stands alone.

    Args:
        root: the layer's seed, an integer of up to 64 bits.
        position: the weight's index in the wrapped layer's `weights`.
        call: the number of the training call, from 0.
        replica: `replica_id_in_sync_group`, 0 without `tf.distribute`.

    Returns:
        int32 `[2]`, for any `tf.random.stateless_*` function.

    Example:

    >>> a, b = seed(7, position=1, call=0), seed(7, position=1, call=1)
    >>> bool(tf.reduce_all(a == seed(7, position=1, call=0))), bool(tf.reduce_all(a == b))
    (True, False)

    References: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), for Philox.
    """
    return _seed(*map(_number, (root, position, call, replica)))


# A graph gets one operation for each of these: building all of them takes longer than running them.
@tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64)] * 4)
def _seed(root: tf.Tensor, position: tf.Tensor, call: tf.Tensor, replica: tf.Tensor) -> tf.Tensor:
    place = tf.stack([_words(position)[0], _words(replica)[0]])
    state = _block(tf.reverse(_words(root), [0]))
    state = _block(tf.bitwise.bitwise_xor(state, place))
    return _block(tf.bitwise.bitwise_xor(state, tf.reverse(_words(call), [0])))


@tf.function(
    autograph=False,
    input_signature=[tf.TensorSpec([2], tf.int32), *[tf.TensorSpec([], tf.int64)] * 2],
)
def _folded(seed: tf.Tensor, high: tf.Tensor, low: tf.Tensor) -> tf.Tensor:
    return _block(tf.bitwise.bitwise_xor(seed, tf.stack([_words(high)[0], _words(low)[0]])))


def _words(integer: tf.Tensor) -> tf.Tensor:
    """The low and the high word of an int64, as int32 `[2]`."""
    return tf.bitcast(integer, tf.int32)


def _block(key: tf.Tensor) -> tf.Tensor:
    """`tf.random.stateless_uniform([2], key, None, None, tf.int32, alg="philox")`.

    That takes forty operations. `StatelessRandomGetKeyCounter`, which would do the scrambling,
    gives another key under XLA where a word of the seed is negative.
    """
    scrambled = _philox(4, [_SCRAMBLE], tf.cast(key, tf.uint64), tf.uint32)
    words = tf.bitcast(tf.reshape(scrambled, [2, 2]), tf.uint64)
    return _philox(2, words[:1], words * tf.constant([0, 1], tf.uint64), tf.int32)


def _philox(size: int, key: Any, counter: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[size],
        key=tf.convert_to_tensor(key, tf.uint64),
        counter=counter,
        alg=tf.random.Algorithm.PHILOX.value,
        dtype=dtype,
    )


def after(seeds: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor | None]) -> list[tf.Tensor]:
    """The same seeds, which in a graph are not known before one of the tensors is.

    The dependence is by data: an integer that is always zero is added, and no optimizer can know
    that it is. So a draw is not made before it is needed, and is not merged with an equal draw from
    the seeds as they were.

    Args:
        seeds: integer tensors.
        tensors: the seeds wait for the first numeric one of these.

    Returns:
        Tensors of the same values.
    """
    if tf.executing_eagerly():
        return list(seeds)
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype.is_complex:
            tensor = tf.math.real(tensor)
        if tensor.dtype.is_floating or tensor.dtype.is_integer:
            zero = _opaque_zero(tensor)
            return [seed + tf.cast(zero, seed.dtype) for seed in seeds]
    return list(seeds)


def _opaque_zero(tensor: tf.Tensor) -> tf.Tensor:
    """An int32 scalar that is always 0 and depends on the tensor's data."""
    return _zero_of(tensor.dtype)(tensor)


@functools.cache
def _zero_of(dtype: tf.DType) -> Callable[[tf.Tensor], tf.Tensor]:
    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None, dtype)])
    def zero(tensor: tf.Tensor) -> tf.Tensor:
        first = tf.reshape(tensor, [-1])[:1]
        return tf.cast(tf.reduce_any((first < 0) & (first > 0)), tf.int32)

    return zero


def replica_id() -> tf.Tensor | int:
    """The number of the replica that runs this code, 0 outside `tf.distribute`."""
    context = tf.distribute.get_replica_context()
    return 0 if context is None else context.replica_id_in_sync_group


def _number(integer: tf.Tensor | int) -> tf.Tensor:
    """An integer of up to 64 bits as int64, of the same bits."""
    if isinstance(integer, int):
        integer = (integer & 0xFFFFFFFFFFFFFFFF ^ (1 << 63)) - (1 << 63)
        return tf.constant(integer, tf.int64)
    return tf.cast(integer, tf.int64)
