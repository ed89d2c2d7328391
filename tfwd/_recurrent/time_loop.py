"""The loop and the products that LSTM, GRU and the recurrent rules of `tfwd.gradients` share.

A sequence is `[time, batch, features]`. Inside the loops each gate is a separate tensor. Splitting
or joining tensors in a loop wakes other threads. It takes as long as a product, even for a few
kilobytes. `docs/lstm.md` has measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# Number of steps per iteration of a loop. An iteration has a fixed cost, which matters if products
# are small.
_STEPS = 4


def rows(sequences: tf.Tensor) -> tf.Tensor:
    """Reshapes `[time, batch, n]` to one matrix `[time * batch, n]`."""
    return tf.reshape(sequences, [-1, sequences.shape[2]])


def unrows(matrix: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Reshapes `[time * batch, n]` to `[time, batch, n]`, with the first two lengths of `like`."""
    shape = [*tf.unstack(tf.shape(like)[:2]), matrix.shape[1]]
    return tf.ensure_shape(tf.reshape(matrix, shape), [*like.shape[:2], matrix.shape[1]])


def project(
    inputs: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor | None, gates: int
) -> list[tf.Tensor]:
    """Computes `inputs @ kernel + bias` for each gate, `[time, batch, units]`.

    Each gate takes one product for all time steps.
    """
    flat = rows(inputs)
    products = [tf.matmul(flat, block) for block in tf.split(kernel, gates, -1)]
    if bias is not None:
        pairs = zip(products, tf.split(bias, gates, -1), strict=True)
        products = [tf.nn.bias_add(product, part) for product, part in pairs]
    return [unrows(product, inputs) for product in products]


def transposed(recurrent_kernel: tf.Tensor, gates: int) -> list[tf.Tensor]:
    """Returns the transposed columns of each gate.

    They are computed once before a loop, because a product that transposes a matrix of this shape
    takes twice the time. The gates are rows of the transposed matrix, which can be split without
    copying.
    """
    return tf.split(tf.transpose(recurrent_kernel), gates, 0)


def scan(
    time: int | tf.Tensor,
    step: Callable[..., tuple[Sequence[tf.Tensor], Sequence[tf.Tensor]]],
    states: Sequence[tf.Tensor],
    kept: Sequence[tf.TensorSpec],
    backwards: bool = False,
    unroll: int = _STEPS,
) -> tuple[list[tf.Tensor], list[tf.TensorArray]]:
    """Runs `step` over time.

    Args:
        time: Number of steps.
        step: Function of a step's number and the states before the step. It returns the states
            after the step, and the tensors to keep.
        states: States before the first executed step.
        kept: Shapes and dtypes of the tensors that a step keeps.
        backwards: bool. Runs the last step first. Default False.
        unroll: int. Number of steps per iteration of the loop. Remaining steps run one by one.
            Default 4.

    Returns:
        The states after all steps, and the kept tensors: lists `[time]` in the order of time.
    """
    by = -1 if backwards else 1

    def one(t: tf.Tensor, *state: Any) -> list:
        new, values = step(t, *state[: len(states)])
        lists = zip(state[len(states) :], values, strict=True)
        return [t + by, *new, *(each.write(t, value) for each, value in lists)]

    def several(*state: Any) -> list:
        for _ in range(unroll):
            state = tuple(one(*state))
        return list(state)

    def more(t: tf.Tensor) -> tf.Tensor:
        return t >= 0 if backwards else t < time

    lists = [
        tf.TensorArray(spec.dtype, time, clear_after_read=False, element_shape=spec.shape)
        for spec in kept
    ]
    state = [tf.convert_to_tensor(time - 1 if backwards else 0), *states, *lists]
    # XLA needs the limits if the loops are differentiated again.
    state = tf.while_loop(
        lambda t, *_: more(t + by * (unroll - 1)), several, state, maximum_iterations=time // unroll
    )
    if unroll > 1:
        state = tf.while_loop(lambda t, *_: more(t), one, state, maximum_iterations=unroll - 1)
    _, *state = state
    return state[: len(states)], state[len(states) :]


def specs_like(tensor: tf.Tensor, count: int) -> list[tf.TensorSpec]:
    """Returns the specs for `scan` if a step keeps `count` tensors like the given one."""
    return [tf.TensorSpec(tensor.shape, tensor.dtype)] * count


def of_sigmoid(y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    """Computes `dy y (1 - y)`, as one op."""
    return tf.raw_ops.SigmoidGrad(y=y, dy=dy)


def of_tanh(y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    """Computes `dy (1 - y^2)`, as one op."""
    return tf.raw_ops.TanhGrad(y=y, dy=dy)
