"""An LSTM over a sequence as a function of tensors, with a gradient written by hand.

Whatever does not depend on the step before is taken out of the loops: the input's product with the
kernel is one product before the forward loop, and the gradients of the kernel, the recurrent kernel
and the input are one product each after the backward loop, which only finds the pre-activations'
gradients. `docs/lstm.md` has the formulas and what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf


class Kept(NamedTuple):
    """What a forward pass leaves for backward, as lists over time.

    Six numbers a time step, row and unit, of which `outputs` is what the caller gets anyway.

    Attributes:
        gates: i, f, g and o after their activations, each `[time][batch, units]`.
        cells: the cell states, the initial one first: `[time + 1][batch, units]`.
        outputs: the outputs `[time, batch, units]`.
    """

    gates: tuple[tf.TensorArray, ...]
    cells: tf.TensorArray
    outputs: tf.Tensor


def lstm(
    inputs: tf.Tensor,
    initial_state: Sequence[tf.Tensor],
    kernel: tf.Tensor,
    recurrent_kernel: tf.Tensor,
    bias: tf.Tensor | None = None,
    mask: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The states of an LSTM over time.

    Formula, with `z_t = x_t K + h_{t-1} U + b` cut into four along its columns:
    `i, f, o = sigmoid(z_i, z_f, z_o)`, `g = tanh(z_g)`, `c_t = f c_{t-1} + i g`,
    `h_t = o tanh(c_t)`. Where the mask is False, `h_t = h_{t-1}` and `c_t = c_{t-1}`.

    Backward keeps the arguments and, a time step, row and unit, six numbers: the four gates, `c_t`
    and `h_t`; in float32 24 bytes, 4 of them the output itself. It transposes the recurrent kernel
    when it runs, and keeps nothing else that follows from the weights alone.

    Args:
        inputs: `[time, batch, features]` of a floating dtype, which all arguments share. Time and
            batch need not be known before the call.
        initial_state: `h` and `c` before the first step, each `[batch, units]`.
        kernel: `K` `[features, 4 * units]`; the order of gates is i, f, g, o, as in Keras.
        recurrent_kernel: `U` `[units, 4 * units]`.
        bias: `b` `[4 * units]`, or None for none.
        mask: boolean `[time, batch]`: False where a step is to be skipped. None for no such steps.

    Returns:
        `h_t` `[time, batch, units]`, and the last `h` and `c`, each `[batch, units]`. They can be
        differentiated as often as is wanted.

    Example:

    >>> x, zeros = tf.ones([5, 2, 3]), tf.zeros([2, 4])
    >>> outputs, h, c = lstm(x, [zeros, zeros], tf.ones([3, 16]), tf.ones([4, 16]))
    >>> outputs.shape.as_list(), bool(tf.reduce_all(outputs[-1] == h))
    ([5, 2, 4], True)

    References: Hochreiter and Schmidhuber, "Long Short-Term Memory" (1997), with the forget gate of
    Gers et al., "Learning to Forget" (2000), and without peepholes.
    """
    if mask is not None:
        mask = tf.expand_dims(mask, 2)

    @tf.custom_gradient
    def run(
        inputs: tf.Tensor,
        h: tf.Tensor,
        c: tf.Tensor,
        kernel: tf.Tensor,
        recurrent_kernel: tf.Tensor,
        *bias: tf.Tensor,
    ) -> tuple[tuple[tf.Tensor, ...], Callable[..., list]]:
        projected = _project(inputs, kernel, *bias)
        kept, last_h, last_c = _forward(projected, h, c, recurrent_kernel, mask)

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            dz, dh, dc = _backward(kept, recurrent_kernel, mask, *upstream)
            dinputs, dkernel = _products(inputs, kernel, dz)
            before = tf.concat([h[None], kept.outputs[:-1]], 0)
            drecurrent = tf.matmul(_rows(before), _rows(dz), transpose_a=True)
            return [
                dinputs,
                dh,
                dc,
                dkernel,
                drecurrent,
                *(tf.reduce_sum(dz, [0, 1]) for _ in bias),
            ]

        return (kept.outputs, last_h, last_c), gradient

    given = [] if bias is None else [bias]
    return run(inputs, *initial_state, kernel, recurrent_kernel, *given)


def _rows(sequences: tf.Tensor) -> tf.Tensor:
    """`[time, batch, n]` as one matrix `[time * batch, n]`."""
    return tf.reshape(sequences, [-1, sequences.shape[2]])


def _unrows(matrix: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    return tf.reshape(matrix, tf.concat([tf.shape(like)[:2], tf.shape(matrix)[1:]], 0))


def _project(inputs: tf.Tensor, kernel: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
    projected = tf.matmul(_rows(inputs), kernel)
    if bias:
        projected = tf.nn.bias_add(projected, bias[0])
    return _unrows(projected, inputs)


def _products(inputs: tf.Tensor, kernel: tf.Tensor, dz: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    rows = _rows(dz)
    dinputs = _unrows(tf.matmul(rows, kernel, transpose_b=True), inputs)
    return dinputs, tf.matmul(_rows(inputs), rows, transpose_a=True)


def _list(size: tf.Tensor, like: tf.Tensor, width: int) -> tf.TensorArray:
    return tf.TensorArray(
        like.dtype, size, clear_after_read=False, element_shape=[like.shape[0], width]
    )


def _forward(
    projected: tf.Tensor,
    h: tf.Tensor,
    c: tf.Tensor,
    recurrent_kernel: tf.Tensor,
    mask: tf.Tensor | None,
) -> tuple[Kept, tf.Tensor, tf.Tensor]:
    time, units = tf.shape(projected)[0], recurrent_kernel.shape[0]
    blocks = tf.split(recurrent_kernel, 4, 1)

    def step(t: tf.Tensor, h: tf.Tensor, c: tf.Tensor, *lists: tf.TensorArray) -> list:
        parts = tf.split(projected[t], 4, 1)
        zi, zf, zg, zo = (x + tf.matmul(h, u) for x, u in zip(parts, blocks, strict=True))
        i, f, g, o = tf.sigmoid(zi), tf.sigmoid(zf), tf.tanh(zg), tf.sigmoid(zo)
        new_c = f * c + i * g
        new_h = o * tf.tanh(new_c)
        if mask is not None:
            new_h, new_c = tf.where(mask[t], new_h, h), tf.where(mask[t], new_c, c)
        written = [a.write(t, x) for a, x in zip(lists, (i, f, g, o, new_h), strict=False)]
        return [t + 1, new_h, new_c, *written, lists[-1].write(t + 1, new_c)]

    lists = [_list(time, h, units) for _ in range(5)]
    cells = _list(time + 1, c, units).write(0, c)
    _, h, c, *lists = tf.while_loop(
        lambda t, *_: t < time, step, [tf.constant(0), h, c, *lists, cells]
    )
    return Kept(tuple(lists[:4]), lists[5], lists[4].stack()), h, c


def _backward(
    kept: Kept,
    recurrent_kernel: tf.Tensor,
    mask: tf.Tensor | None,
    doutputs: tf.Tensor,
    dh: tf.Tensor,
    dc: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The gradients of the pre-activations `[time, batch, 4 * units]` and of the first state."""
    time, units = tf.shape(doutputs)[0], recurrent_kernel.shape[0]
    blocks = [tf.transpose(u) for u in tf.split(recurrent_kernel, 4, 1)]

    def step(t: tf.Tensor, dh: tf.Tensor, dc: tf.Tensor, dz: tf.TensorArray) -> list:
        i, f, g, o = (gate.read(t) for gate in kept.gates)
        dh += doutputs[t]
        tanh_c = tf.tanh(kept.cells.read(t + 1))
        dc_t = dc + dh * o * (1 - tanh_c * tanh_c)
        parts = [
            dc_t * g * i * (1 - i),
            dc_t * kept.cells.read(t) * f * (1 - f),
            dc_t * i * (1 - g * g),
            dh * tanh_c * o * (1 - o),
        ]
        dc_t *= f
        if mask is not None:
            # The products, not their factors: what was computed in a masked step may not be finite.
            parts = [tf.where(mask[t], part, tf.zeros_like(part)) for part in parts]
            dc_t = tf.where(mask[t], dc_t, dc)
        dh_t = tf.add_n([tf.matmul(x, u) for x, u in zip(parts, blocks, strict=True)])
        if mask is not None:
            dh_t += tf.where(mask[t], tf.zeros_like(dh), dh)
        return [t - 1, dh_t, dc_t, dz.write(t, tf.concat(parts, 1))]

    dz = _list(time, dh, 4 * units)
    _, dh, dc, dz = tf.while_loop(lambda t, *_: t >= 0, step, [time - 1, dh, dc, dz])
    return dz.stack(), dh, dc
