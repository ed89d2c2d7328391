"""The matrix products of a training step alone, which every implementation needs.

An LSTM of time T, batch B, input I and units U has `R = T B` rows and `24 R U (U + I)` floating
point operations, forward and backward. Each of two loops over the steps has `8 R U^2` operations,
in products of B rows. All other operations are in products of all rows. This module computes only
these products, in the same order, without gates, masks and updates. The loops use four blocks, as
tfwd's LSTM does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf


class Lstm(NamedTuple):
    """Sizes of an LSTM."""

    time: int
    batch: int
    features: int
    units: int


class Dense(NamedTuple):
    """Sizes of a product of all rows, such as a softmax's."""

    rows: int
    features: int
    units: int


def run(layers: Sequence[Lstm | Dense]) -> Callable[[], None]:
    """Returns a function that computes the products of the layers, one layer after the other."""
    made = [_lstm(*layer) if isinstance(layer, Lstm) else _dense(*layer) for layer in layers]

    @tf.function
    def products() -> list[tf.Tensor]:
        found: list[list[tf.Tensor]] = [[]]
        for make in made:
            with tf.control_dependencies(found[-1]):
                found.append(make())
        # All tensors are returned, because TensorFlow removes an operation without a used result.
        return [tensor for tensors in found for tensor in tensors]

    def step() -> None:
        for tensor in products():
            tensor.numpy()

    return step


def _given(*shapes: tuple[int, int]) -> list[tf.Variable]:
    """Returns small random matrices. Their products in a loop get smaller and do not overflow."""
    return [
        tf.Variable(tf.random.stateless_normal(shape, [1, i]) / (8 * shape[0] ** 0.5))
        for i, shape in enumerate(shapes)
    ]


def _dense(rows: int, features: int, units: int) -> Callable[[], list[tf.Tensor]]:
    variables = _given((rows, features), (features, units))

    def make() -> list[tf.Tensor]:
        # The variables are read here, so that TensorFlow does not reuse products of another step.
        x, kernel = (variable.read_value() for variable in variables)
        z = x @ kernel
        return [tf.matmul(z, kernel, transpose_b=True), tf.matmul(x, z, transpose_a=True)]

    return make


def _lstm(time: int, batch: int, features: int, units: int) -> Callable[[], list[tf.Tensor]]:
    rows = time * batch
    square = (units, units)
    variables = _given(
        (rows, features), (rows, units), (features, 4 * units), square, square, square, square
    )
    steps = tf.Variable(time)  # with a constant, the loop would be unrolled

    def loop(state: tf.Tensor, blocks: list[tf.Tensor]) -> tf.Tensor:
        return tf.while_loop(
            lambda step, _: step < steps,
            lambda step, state: (step + 1, tf.add_n([state @ block for block in blocks])),
            [tf.constant(0), state],
        )[1]

    def make() -> list[tf.Tensor]:
        x, h, kernel, *blocks = (variable.read_value() for variable in variables)
        z = x @ kernel
        with tf.control_dependencies([z]):
            state = loop(h[:batch], blocks)
        back = loop(state, [tf.transpose(block) for block in blocks])
        with tf.control_dependencies([back]):
            z = tf.identity(z)
        return [
            back,
            tf.matmul(z, kernel, transpose_b=True),
            tf.matmul(x, z, transpose_a=True),
            tf.matmul(h, z, transpose_a=True),
        ]

    return make
