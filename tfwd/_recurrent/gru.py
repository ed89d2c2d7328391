"""A GRU over a sequence as a function of tensors, with a hand-written gradient.

As in `tfwd._recurrent.lstm`, everything that does not depend on the previous step is computed
outside the loops. `docs/lstm.md` has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfwd._graph.custom_gradient import custom_gradient
from tfwd._recurrent import time_loop


class Kept(NamedTuple):
    """The tensors that forward stores for backward: five numbers per time step, row and unit.

    Attributes:
        gates: z, r and the candidate g after their activations, and `q = h U_g + b`, which r
            resets. Each is a list `[time][batch, units]`.
        outputs: Outputs `[time, batch, units]`, which the caller gets too.
    """

    gates: list[tf.TensorArray]
    outputs: tf.Tensor


def gru(
    inputs: tf.Tensor,
    initial_state: tf.Tensor,
    kernel: tf.Tensor,
    recurrent_kernel: tf.Tensor,
    bias: tf.Tensor | None = None,
    mask: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes the states of a GRU over time. The reset gate is applied after the product.

    Formula: `a_t = x_t K + b_0` and `u_t = h_{t-1} U + b_1` are split into three parts along their
    columns. `z, r = sigmoid(a_z + u_z, a_r + u_r)`, `g = tanh(a_g + r u_g)`, `h_t = z h_{t-1} + (1
    - z) g`. Where the mask is False, `h_t = h_{t-1}`.

    Backward stores the arguments, and five numbers per time step, row and unit: z, r, g, `u_g` and
    `h_t`. In float32 these are 20 bytes, of which 4 are the output itself. The recurrent kernel is
    transposed in backward. Nothing else that depends only on the weights is stored.

    Args:
        inputs: `[time, batch, features]` of a floating dtype, which all arguments share. Time and
            batch need not be static.
        initial_state: `h` before the first step, `[batch, units]`.
        kernel: `K` `[features, 3 * units]`. The order of gates is z, r, g, as in Keras.
        recurrent_kernel: `U` `[units, 3 * units]`.
        bias: `b` `[2, 3 * units]`. Default None, for no bias.
        mask: Boolean `[time, batch]`, False for steps to skip. Default None, for no mask.

    Returns:
        `h_t` `[time, batch, units]`, and the last `h` `[batch, units]`. They can be differentiated
        repeatedly.

    Example:
        >>> x = tf.ones([5, 2, 3])
        >>> outputs, h = gru(x, tf.zeros([2, 4]), tf.ones([3, 12]), tf.ones([4, 12]))
        >>> outputs.shape.as_list(), bool(tf.reduce_all(outputs[-1] == h))
        ([5, 2, 4], True)

    References: Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder for
    Statistical Machine Translation" (2014), in cuDNN's variant (`reset_after=True` in Keras).
    """
    if mask is not None:
        mask = tf.expand_dims(mask, 2)

    @custom_gradient
    def run(
        inputs: tf.Tensor,
        h: tf.Tensor,
        kernel: tf.Tensor,
        recurrent_kernel: tf.Tensor,
        *bias: tf.Tensor,
    ) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[..., list]]:
        kept, last = _forward(inputs, h, kernel, recurrent_kernel, mask, *bias)

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            before = tf.concat([h[None], kept.outputs[:-1]], 0)
            (dz, dr, dg, dq), dh = _backward(kept, before, recurrent_kernel, mask, *upstream)
            of_inputs = time_loop.rows(tf.concat([dz, dr, dg], 2))
            of_state = time_loop.rows(tf.concat([dz, dr, dq], 2))
            dinputs = tf.matmul(of_inputs, kernel, transpose_b=True)
            dkernel = tf.matmul(time_loop.rows(inputs), of_inputs, transpose_a=True)
            drecurrent = tf.matmul(time_loop.rows(before), of_state, transpose_a=True)
            sums = [tf.reduce_sum(each, 0) for each in (of_inputs, of_state)]
            dbias = [tf.stack(sums) for _ in bias]
            return [time_loop.unrows(dinputs, inputs), dh, dkernel, drecurrent, *dbias]

        return (kept.outputs, last), gradient

    given = [] if bias is None else [bias]
    # A state may be a variable, whose value may change before backward.
    return run(inputs, tf.convert_to_tensor(initial_state), kernel, recurrent_kernel, *given)


def _forward(
    inputs: tf.Tensor,
    h: tf.Tensor,
    kernel: tf.Tensor,
    recurrent_kernel: tf.Tensor,
    mask: tf.Tensor | None,
    bias: tf.Tensor | None = None,
) -> tuple[Kept, tf.Tensor]:
    time, blocks = tf.shape(inputs)[0], tf.split(recurrent_kernel, 3, -1)
    of_candidate = None
    if bias is not None:
        # Biases of the sums of z and r can be added before the loop.
        *of_gates, of_candidate = tf.split(bias[1], 3)
        bias = bias[0] + tf.concat([*of_gates, tf.zeros_like(of_candidate)], 0)
    projected = time_loop.project(inputs, kernel, bias, 3)

    def step(t: tf.Tensor, h: tf.Tensor) -> tuple[list, list]:
        uz, ur, q = (tf.matmul(h, block) for block in blocks)
        if of_candidate is not None:
            q = tf.nn.bias_add(q, of_candidate)
        az, ar, ag = (part[t] for part in projected)
        z, r = tf.sigmoid(az + uz), tf.sigmoid(ar + ur)
        g = tf.tanh(ag + r * q)
        new_h = g + z * (h - g)
        if mask is not None:
            new_h = tf.where(mask[t], new_h, h)
        return [new_h], [z, r, g, q, new_h]

    (h,), lists = time_loop.scan(time, step, [h], time_loop.specs_like(h, 5))
    *gates, outputs = lists
    return Kept(gates, outputs.stack()), h


def _backward(
    kept: Kept,
    before: tf.Tensor,
    recurrent_kernel: tf.Tensor,
    mask: tf.Tensor | None,
    doutputs: tf.Tensor,
    dh: tf.Tensor,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns the gradients of the sums of z, r and g, of q, and of the first state.

    Args:
        kept: Tensors that forward stored.
        before: States before each step, `[time, batch, units]`.
        recurrent_kernel: `[units, 3 * units]`.
        mask: Boolean `[time, batch, 1]`, or None.
        doutputs: Gradient of the outputs.
        dh: Gradient of the last state.
    """
    time, blocks = tf.shape(doutputs)[0], time_loop.transposed(recurrent_kernel, 3)

    def step(t: tf.Tensor, dh: tf.Tensor) -> tuple[list, list]:
        z, r, g, q = (gate.read(t) for gate in kept.gates)
        dh += doutputs[t]
        dg = time_loop.of_tanh(g, dh * (1 - z))
        parts = [
            time_loop.of_sigmoid(z, dh * (before[t] - g)),
            time_loop.of_sigmoid(r, dg * q),
            dg,
            dg * r,
        ]
        through = dh * z
        if mask is not None:
            # The products are masked, because factors of a masked step may not be finite.
            parts = [tf.where(mask[t], part, tf.zeros_like(part)) for part in parts]
            through = tf.where(mask[t], through, dh)
        dz, dr, _, dq = parts
        pairs = zip((dz, dr, dq), blocks, strict=True)
        dh = tf.add_n([through, *(tf.matmul(part, block) for part, block in pairs)])
        return [dh], parts

    (dh,), lists = time_loop.scan(time, step, [dh], time_loop.specs_like(dh, 4), backwards=True)
    return [each.stack() for each in lists], dh
