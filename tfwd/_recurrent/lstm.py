"""An LSTM over a sequence as a function of tensors, with a hand-written gradient.

Everything that does not depend on the previous step is computed outside the loops. The product of
the input and the kernel is one product before the forward loop. The backward loop computes only the
gradients of the pre-activations. After the loop, the gradients of the kernel, the recurrent kernel
and the input are one product each. `docs/lstm.md` has the formulas and measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfwd._graph.custom_gradient import custom_gradient
from tfwd._recurrent import time_loop


class Kept(NamedTuple):
    """The tensors that forward stores for backward, as lists over time.

    They are six numbers per time step, row and unit. The caller gets `outputs` too.

    Attributes:
        gates: i, f, g and o after their activations, each `[time][batch, units]`.
        cells: Cell states before each step, `[time][batch, units]`.
        outputs: Outputs `[time, batch, units]`.
        last_cell: Cell state after the last step.
    """

    gates: list[tf.TensorArray]
    cells: tf.TensorArray
    outputs: tf.Tensor
    last_cell: tf.Tensor


def lstm(
    inputs: tf.Tensor,
    initial_state: Sequence[tf.Tensor],
    kernel: tf.Tensor,
    recurrent_kernel: tf.Tensor,
    bias: tf.Tensor | None = None,
    mask: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Computes the states of an LSTM over time.

    Formula: `z_t = x_t K + h_{t-1} U + b` is split into four parts along its columns.
    `i, f, o = sigmoid(z_i, z_f, z_o)`, `g = tanh(z_g)`, `c_t = f c_{t-1} + i g`,
    `h_t = o tanh(c_t)`. Where the mask is False, `h_t = h_{t-1}` and `c_t = c_{t-1}`.

    Backward stores the arguments, and six numbers per time step, row and unit: the four gates,
    `c_t` and `h_t`. In float32 these are 24 bytes, of which 4 are the output itself. The recurrent
    kernel is transposed in backward. Nothing else that depends only on the weights is stored.

    Args:
        inputs: `[time, batch, features]` of a floating dtype, which all arguments share. Time and
            batch need not be static.
        initial_state: `h` and `c` before the first step, each `[batch, units]`.
        kernel: `K` `[features, 4 * units]`. The order of gates is i, f, g, o, as in Keras.
        recurrent_kernel: `U` `[units, 4 * units]`.
        bias: `b` `[4 * units]`. Default None, for no bias.
        mask: Boolean `[time, batch]`, False for steps to skip. Default None, for no mask.

    Returns:
        `h_t` `[time, batch, units]`, and the last `h` and `c`, each `[batch, units]`. They can be
        differentiated repeatedly.

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

    @custom_gradient
    def run(
        inputs: tf.Tensor,
        h: tf.Tensor,
        c: tf.Tensor,
        kernel: tf.Tensor,
        recurrent_kernel: tf.Tensor,
        *bias: tf.Tensor,
    ) -> tuple[tuple[tf.Tensor, ...], Callable[..., list]]:
        projected = time_loop.project(inputs, kernel, bias[0] if bias else None, 4)
        kept, last_h = _forward(projected, h, c, recurrent_kernel, mask)

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            dz, dh, dc = _backward(kept, recurrent_kernel, mask, *upstream)
            rows, before = time_loop.rows(dz), tf.concat([h[None], kept.outputs[:-1]], 0)
            dinputs = time_loop.unrows(tf.matmul(rows, kernel, transpose_b=True), inputs)
            dkernel = tf.matmul(time_loop.rows(inputs), rows, transpose_a=True)
            drecurrent = tf.matmul(time_loop.rows(before), rows, transpose_a=True)
            dbias = [tf.reduce_sum(rows, 0) for _ in bias]
            return [dinputs, dh, dc, dkernel, drecurrent, *dbias]

        return (kept.outputs, last_h, kept.last_cell), gradient

    given = [] if bias is None else [bias]
    # A state may be a variable, whose value may change before backward.
    first = [tf.convert_to_tensor(state) for state in initial_state]
    return run(inputs, *first, kernel, recurrent_kernel, *given)


def _forward(
    projected: list[tf.Tensor],
    h: tf.Tensor,
    c: tf.Tensor,
    recurrent_kernel: tf.Tensor,
    mask: tf.Tensor | None,
) -> tuple[Kept, tf.Tensor]:
    time, blocks = tf.shape(projected[0])[0], tf.split(recurrent_kernel, 4, -1)

    def step(t: tf.Tensor, h: tf.Tensor, c: tf.Tensor) -> tuple[list, list]:
        pairs = zip(projected, blocks, strict=True)
        zi, zf, zg, zo = (x[t] + tf.matmul(h, block) for x, block in pairs)
        i, f, g, o = tf.sigmoid(zi), tf.sigmoid(zf), tf.tanh(zg), tf.sigmoid(zo)
        new_c = f * c + i * g
        new_h = o * tf.tanh(new_c)
        if mask is not None:
            new_h, new_c = tf.where(mask[t], new_h, h), tf.where(mask[t], new_c, c)
        return [new_h, new_c], [i, f, g, o, c, new_h]

    (h, c), lists = time_loop.scan(time, step, [h, c], time_loop.specs_like(h, 6))
    *gates, cells, outputs = lists
    return Kept(gates, cells, outputs.stack(), c), h


def _backward(
    kept: Kept,
    recurrent_kernel: tf.Tensor,
    mask: tf.Tensor | None,
    doutputs: tf.Tensor,
    dh: tf.Tensor,
    dc: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the gradients of the pre-activations and of the first state.

    The gradients of the pre-activations are `[time, batch, 4 * units]`.
    """
    time = tf.shape(doutputs)[0]
    blocks = time_loop.transposed(recurrent_kernel, 4)

    def step(t: tf.Tensor, dh: tf.Tensor, dc: tf.Tensor, c: tf.Tensor) -> tuple[list, list]:
        i, f, g, o = (gate.read(t) for gate in kept.gates)
        before, tanh_c = kept.cells.read(t), tf.tanh(c)
        dh += doutputs[t]
        dc_t = dc + time_loop.of_tanh(tanh_c, dh * o)
        dz = [
            time_loop.of_sigmoid(i, dc_t * g),
            time_loop.of_sigmoid(f, dc_t * before),
            time_loop.of_tanh(g, dc_t * i),
            time_loop.of_sigmoid(o, dh * tanh_c),
        ]
        dc_t *= f
        if mask is not None:
            # The products are masked, because factors of a masked step may not be finite.
            dz = [tf.where(mask[t], part, tf.zeros_like(part)) for part in dz]
            dc_t = tf.where(mask[t], dc_t, dc)
        pairs = zip(dz, blocks, strict=True)
        dh_t = tf.add_n([tf.matmul(part, block) for part, block in pairs])
        if mask is not None:
            dh_t += tf.where(mask[t], tf.zeros_like(dh), dh)
        return [dh_t, dc_t, before], dz

    (dh, dc, _), lists = time_loop.scan(
        time, step, [dh, dc, kept.last_cell], time_loop.specs_like(dh, 4), backwards=True
    )
    return tf.concat([dz.stack() for dz in lists], 2), dh, dc
