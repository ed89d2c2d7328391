"""Stateless seeds: pure functions of a root seed, a position, a call and a replica.

A draw is a pure function of the layer's root seed, the weight's position in the layer, the number
of the call and the replica. Names play no part: Keras numbers them by what was built before. Since
nothing else enters, the same draw can be made again at any time: in backward, after a restart, or
when a function is traced anew.
"""

from __future__ import annotations

import tensorflow as tf

from tfwd._graph.constants import constant
from tfwd._random import philox

# Replicas are numbered in the highest 16 bits of a call's number.
_REPLICA = 1 << 48


def fold(seed: tf.Tensor, high: tf.Tensor | int, low: tf.Tensor | int) -> tf.Tensor:
    """Mixes two integers into a seed.

    `fold(s, a, b)` is the first 64 bits of `Philox(key = s, counter = [b, -1 - a])`, so that chains
    of folds are a keyed hash of all that was folded in (CBC-MAC). Draws from a seed count from
    `[0, 0]`; what is folded with small integers is none of them.

    Args:
        seed: int32 `[2]`.
        high, low: integers of up to 64 bits.

    Returns:
        int32 `[2]`.
    """
    counter = tf.raw_ops.Pack(values=[_number(low), -1 - _number(high)])
    return philox.words([2], philox.key_of(seed), tf.bitcast(counter, tf.uint64))


def seed(
    root: tf.Tensor | int, position: int, call: tf.Tensor | int, replica: tf.Tensor | int = 0
) -> tf.Tensor:
    """Returns the seed of one weight's draw in one training call.

    Formula: words `2 * position` and `2 * position + 1` of the stream of 32-bit words
    `Philox(key = root, counter = [., call + 2^48 * replica])`.

    Args:
        root: the layer's seed, an integer of up to 64 bits.
        position: the weight's index in the wrapped layer's `weights`.
        call: the number of the training call, from 0, below 2^48.
        replica: `replica_id_in_sync_group`, 0 without `tf.distribute`.

    Returns:
        int32 `[2]`, for any `tf.random.stateless_*` function.

    Example:

    >>> a, b = seed(7, position=1, call=0), seed(7, position=1, call=1)
    >>> bool(tf.reduce_all(a == seed(7, position=1, call=0))), bool(tf.reduce_all(a == b))
    (True, False)

    References: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), for Philox.
    """
    state = tf.stack([_number(root), _number(call)])
    return _drawn(state, replica, position + 1)[position]


def seeds(state: tf.Tensor, replica: tf.Tensor | int, count: int) -> list[tf.Tensor]:
    """`seed` at the positions below `count`, by one draw.

    Args:
        state: int64 `[root, call]`.
        replica: as in `seed`.
        count: how many.

    Returns:
        A list of int32 `[2]`.
    """
    return tf.raw_ops.Unpack(value=_drawn(state, replica, count), num=count)


def _drawn(state: tf.Tensor, replica: tf.Tensor | int, count: int) -> tf.Tensor:
    bits = tf.raw_ops.Bitcast(input=state, type=tf.uint64)
    key, call = tf.raw_ops.Split(axis=constant(0, tf.int32), value=bits, num_split=2)
    if not isinstance(replica, int) or replica:
        call += tf.bitcast(_number(replica) * _REPLICA, tf.uint64)
    counter = tf.raw_ops.ConcatV2(
        values=[constant((0,), tf.uint64), call], axis=constant(0, tf.int32)
    )
    return philox.words([count, 2], key, counter)


def replica_id() -> tf.Tensor | int:
    """Returns the number of the replica that runs this code, 0 outside `tf.distribute`."""
    context = tf.distribute.get_replica_context()
    number = 0 if context is None else context.replica_id_in_sync_group
    known = tf.get_static_value(number) if tf.is_tensor(number) else number
    return number if known is None else int(known)


def _number(integer: tf.Tensor | int) -> tf.Tensor:
    """Returns an integer of up to 64 bits as int64, of the same bits."""
    if isinstance(integer, int):
        integer = (integer & 0xFFFFFFFFFFFFFFFF ^ (1 << 63)) - (1 << 63)
        return tf.constant(integer, tf.int64)
    return tf.cast(integer, tf.int64)
