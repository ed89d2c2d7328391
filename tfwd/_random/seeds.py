"""Stateless seeds: pure functions of a root seed, a position, a call and a replica.

A draw depends only on the layer's root seed, the weight's position in the layer, the training-call
counter and the replica. It does not depend on names, because Keras numbers names in the order of
creation. So the same draw can be repeated at any time: in backward, after a restart, or when a
function is traced again.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfwd._graph.cached_constants import constant
from tfwd._random import philox_op

# The highest 16 bits of a call number are the replica's number.
_REPLICA = 1 << 48
_FEW = 8  # unused seeds per used seed


def fold_in(seed: tf.Tensor, high: tf.Tensor | int, low: tf.Tensor | int) -> tf.Tensor:
    """Mixes two integers into a seed.

    `fold_in(s, a, b)` is the first 64 bits of `Philox(key = s, counter = [b, -1 - a])`. So chains
    of folds are a keyed hash of all folded integers (CBC-MAC). Draws from a seed count from
    `[0, 0]`, so they never equal a fold of small integers.

    Args:
        seed: int32 `[2]`.
        high, low: Integers of up to 64 bits.

    Returns:
        int32 `[2]`.
    """
    counter = tf.raw_ops.Pack(values=[_number(low), -1 - _number(high)])
    return philox_op.random_words([2], philox_op.key_of(seed), tf.bitcast(counter, tf.uint64))


def seed(
    root: tf.Tensor | int, position: int, call: tf.Tensor | int, replica: tf.Tensor | int = 0
) -> tf.Tensor:
    """Returns the seed of one weight's draw in one training call.

    Formula: words `2 * position` and `2 * position + 1` of the stream of 32-bit words
    `Philox(key = root, counter = [., call + 2^48 * replica])`.

    Args:
        root: Seed of the layer, an integer of up to 64 bits.
        position: int. Index of the weight in the wrapped layer's `weights`.
        call: Number of the training call, from 0, below 2^48.
        replica: `replica_id_in_sync_group`, 0 without `tf.distribute`. Default 0.

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


def seeds(state: tf.Tensor, replica: tf.Tensor | int, positions: Sequence[int]) -> list[tf.Tensor]:
    """Returns the results of `seed` for some positions, with one draw.

    Args:
        state: int64 `[root, call]`.
        replica: As in `seed`.
        positions: Indices of weights, at least one.

    Returns:
        A list of int32 `[2]`.
    """
    count = max(positions) + 1
    drawn = _drawn(state, replica, count)
    if count > _FEW * len(positions):  # a tensor for each unused seed would take longer
        chosen = tf.gather(drawn, tf.constant(positions, tf.int32))
        return tf.raw_ops.Unpack(value=chosen, num=len(positions))
    unpacked = tf.raw_ops.Unpack(value=drawn, num=count)
    return [unpacked[position] for position in positions]


def _drawn(state: tf.Tensor, replica: tf.Tensor | int, count: int) -> tf.Tensor:
    bits = tf.raw_ops.Bitcast(input=state, type=tf.uint64)
    key, call = tf.raw_ops.Split(axis=constant(0, tf.int32), value=bits, num_split=2)
    if not isinstance(replica, int) or replica:
        call += tf.bitcast(_number(replica) * _REPLICA, tf.uint64)
    counter = tf.raw_ops.ConcatV2(
        values=[constant((0,), tf.uint64), call], axis=constant(0, tf.int32)
    )
    return philox_op.random_words([count, 2], key, counter)


def replica_id() -> tf.Tensor | int:
    """Returns the number of the replica that runs this code, or 0 outside `tf.distribute`."""
    context = tf.distribute.get_replica_context()
    number = 0 if context is None else context.replica_id_in_sync_group
    known = tf.get_static_value(number) if tf.is_tensor(number) else number
    return number if known is None else int(known)


def _number(integer: tf.Tensor | int) -> tf.Tensor:
    """Returns an integer of up to 64 bits as int64 with the same bits."""
    if isinstance(integer, int):
        integer = (integer & 0xFFFFFFFFFFFFFFFF ^ (1 << 63)) - (1 << 63)
        return tf.constant(integer, tf.int64)
    return tf.cast(integer, tf.int64)
