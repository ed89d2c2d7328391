"""Computes the moments of weights without a rule, from the gradients of single examples.

If nothing in the model is random, the model runs on each example alone: with `tf.vectorized_map` if
possible, otherwise in a loop. If something is random, such as dropout on activations, an example
alone would get another mask than in the batch. The batch then runs forward once, and backward once
per example, which costs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._graph import private_graph_apis
from tfwd.dtypes import at_least_float32
from tfwd.gradients.block_sums import sum_over_blocks

# Size in bytes of the gradients that vectorized_map computes at once. It needs several times as
# much memory.
MAP_BYTES = 16 << 20

# Operations that vectorized_map converts to operations that fail at run time. The gradient of a
# loop stores its steps in lists. A batched product becomes a broadcasting product. In TensorFlow
# 2.21 with oneDNN, this product writes past its result and ends the process.
FAILING = {"While", "StatelessWhile", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"}

Sums = tuple[tf.Tensor, ...]  # all sum_b g_b, then all sum_b g_b^2


def one_by_one(
    losses: Callable[[int | tf.Tensor], tf.Tensor],
    variables: list[keras.Variable],
    batch: int | tf.Tensor,
) -> tuple[str, Sums]:
    """Computes the sums from each example alone.

    Args:
        losses: Function from an example's number to its loss, a scalar.
        variables: Weights.
        batch: int or scalar tensor. Number of examples.

    Returns:
        The method's name, and the sums.
    """

    def gradients(index: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            loss = losses(index)
        found = tape.gradient(
            loss, [_keras.variables.tf_variable(v) for v in variables], unconnected_gradients="zero"
        )
        return tuple(at_least_float32(tf.convert_to_tensor(gradient)) for gradient in found)

    def traced(index: tf.Tensor) -> tuple[tf.Tensor, ...]:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        found = gradients(index)
        if any(
            n.op in FAILING
            for n in private_graph_apis.nodes(graph, graph.get_operations()[before:])
        ):
            raise NotImplementedError("the result of vectorized_map fails when it runs")
        return found

    def mapped(start: int | tf.Tensor, size: int | tf.Tensor) -> Sums:
        stacked = tf.vectorized_map(traced, tf.range(start, start + size))
        return _sums(
            [tf.reduce_sum(g, 0) for g in stacked], [tf.reduce_sum(g * g, 0) for g in stacked]
        )

    entries = sum(int(tf.TensorShape(v.shape).num_elements()) for v in variables)
    block = max(1, MAP_BYTES // (4 * entries))
    try:
        with _without_log():
            return "vectorized_map", sum_over_blocks(batch, block, mapped)
    except Exception:  # an operation has no converter, which raises many types of errors
        return "loop", _loop(gradients, batch)


def backward_each(
    losses: tf.Tensor, tape: tf.GradientTape, variables: list[keras.Variable]
) -> tuple[str, Sums]:
    """Computes the sums with one backward pass per example, after one forward pass.

    Args:
        losses: `[B]`.
        tape: Persistent tape that has recorded the losses.
        variables: Weights.

    Returns:
        The method's name, and the sums.
    """

    def gradients(index: tf.Tensor) -> tuple[tf.Tensor, ...]:
        upstream = tf.one_hot(index, tf.shape(losses)[0], dtype=losses.dtype)
        found = tape.gradient(
            losses,
            [_keras.variables.tf_variable(v) for v in variables],
            output_gradients=upstream,
            unconnected_gradients="zero",
        )
        return tuple(at_least_float32(tf.convert_to_tensor(gradient)) for gradient in found)

    return "backward_each", _loop(gradients, losses.shape[0] or tf.shape(losses)[0])


@contextmanager
def _without_log() -> Iterator[None]:
    """Silences vectorized_map, which logs pages about an operation without a converter."""

    def never(record: Any) -> bool:
        return False

    logger = tf.get_logger()
    logger.addFilter(never)
    try:
        yield
    finally:
        logger.removeFilter(never)


def _loop(gradients: Callable[[Any], tuple[tf.Tensor, ...]], batch: int | tf.Tensor) -> Sums:
    def one(start: int | tf.Tensor, size: int | tf.Tensor) -> Sums:
        found = gradients(start)
        return _sums(list(found), [g * g for g in found])

    return sum_over_blocks(batch, 1, one)


def _sums(first: list[tf.Tensor], second: list[tf.Tensor]) -> Sums:
    return (*first, *second)
