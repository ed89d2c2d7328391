"""Sums over the examples of a batch in blocks, so that a tensor holds only a few examples."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


def sum_over_blocks(
    batch: int | tf.Tensor,
    block: int,
    function: Callable[[int | tf.Tensor, int | tf.Tensor], tuple[tf.Tensor, ...]],
) -> tuple[tf.Tensor, ...]:
    """Sums `function(start, size)` over blocks of at most `block` examples.

    In a graph, many blocks run in a loop whose body is traced once. The first block may be smaller.

    Args:
        batch: int or scalar tensor. Number of examples.
        block: int. Largest number of examples in a block.
        function: Function of a block's first example and of its number of examples.

    Returns:
        The sums of the function's results.
    """
    if isinstance(batch, int):
        if batch <= block:
            return function(0, batch)
        block = -(-batch // -(-batch // block))  # blocks of equal size, if possible
        if tf.executing_eagerly() or batch <= 4 * block:
            sums = [function(start, min(block, batch - start)) for start in range(0, batch, block)]
            return tuple(tf.add_n(list(parts)) for parts in zip(*sums, strict=True))
    first = (batch - 1) % block + 1
    count = (batch - first) // block

    def body(index: tf.Tensor, *sums: tf.Tensor) -> tuple:
        more = function(first + index * block, block)
        return (index + 1, *(s + m for s, m in zip(sums, more, strict=True)))

    initial = (tf.constant(0), *function(0, first))
    result = tf.while_loop(lambda index, *_: index < count, body, initial, parallel_iterations=1)
    return tuple(result[1:])
