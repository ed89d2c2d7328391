"""What the recurrent layers with a gradient written by hand share: their loops and products.

A sequence is `[time, batch, features]`, and inside the loops each gate is a tensor of its own:
cutting or joining them there, though they are a few kilobytes, wakes other threads and takes as
long as a product. `docs/lstm.md` has what was measured.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

# Steps in a turn of a loop: a turn has a price of its own, which counts where products are small.
_STEPS = 4


def rows(sequences: tf.Tensor) -> tf.Tensor:
    """`[time, batch, n]` as one matrix `[time * batch, n]`."""
    return tf.reshape(sequences, [-1, sequences.shape[2]])


def unrows(matrix: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """`[time * batch, n]` as `[time, batch, n]`, with the first two lengths of `like`."""
    shape = [*tf.unstack(tf.shape(like)[:2]), matrix.shape[1]]
    return tf.ensure_shape(tf.reshape(matrix, shape), [*like.shape[:2], matrix.shape[1]])


def project(
    inputs: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor | None, gates: int
) -> list[tf.Tensor]:
    """`inputs @ kernel + bias` by gate, each `[time, batch, units]`: one product for all steps."""
    flat = rows(inputs)
    products = [tf.matmul(flat, block) for block in tf.split(kernel, gates, -1)]
    if bias is not None:
        pairs = zip(products, tf.split(bias, gates, -1), strict=True)
        products = [tf.nn.bias_add(product, part) for product, part in pairs]
    return [unrows(product, inputs) for product in products]


def transposed(recurrent_kernel: tf.Tensor, gates: int) -> list[tf.Tensor]:
    """The transposed columns of each gate.

    Made once, before a loop: a product with a transposed matrix of this shape takes twice the time.
    The gates are rows of the transposed matrix, which are cut without copying.
    """
    return tf.split(tf.transpose(recurrent_kernel), gates, 0)


def room(size: tf.Tensor, like: tf.Tensor) -> tf.TensorArray:
    """An empty list of `size` tensors like the given one."""
    return tf.TensorArray(like.dtype, size, clear_after_read=False, element_shape=like.shape)


def loop(
    time: tf.Tensor,
    more: Callable[[tf.Tensor], tf.Tensor],
    by: int,
    step: Callable[..., list],
    state: list,
) -> list:
    """`step` as long as there are `more` steps, several a turn and the rest one by one.

    Args:
        time: how many steps there are.
        more: whether a step of the number is to be made. If it is not, later ones are not either.
        by: the difference between the numbers of two steps.
        step: a map from a state to the next; a state begins with the number of the step.
        state: the first state.
    """

    def several(*state: tf.Tensor) -> list:
        new = list(state)
        for _ in range(_STEPS):
            new = step(*new)
        return new

    # The limits are for XLA, which must know them if the loops are differentiated again.
    state = tf.while_loop(
        lambda t, *_: more(t + by * (_STEPS - 1)), several, state, maximum_iterations=time // _STEPS
    )
    return tf.while_loop(lambda t, *_: more(t), step, state, maximum_iterations=_STEPS - 1)


def of_sigmoid(y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    """`dy y (1 - y)`, as one op."""
    return tf.raw_ops.SigmoidGrad(y=y, dy=dy)


def of_tanh(y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    """`dy (1 - y^2)`, as one op."""
    return tf.raw_ops.TanhGrad(y=y, dy=dy)
