"""Recurrent loop whose gradient goes only to the pre-activations.

Each step computes `r = product(h)`, then `states = step(z_t, r, states)`. Forward stores `r` and
the states. Backward runs the elementwise `step` again, and one product per step. It computes the
gradients of `z` and `r` anyway. The gradients of the weights need only these two gradients, in
products over all time steps, outside the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfwd._graph.custom_gradient import custom_gradient
from tfwd._recurrent import time_loop
from tfwd.gradients.gradient_forms import size

Step = Callable[[tf.Tensor, tf.Tensor, list[tf.Tensor]], list[tf.Tensor]]


def scan(
    z: tf.Tensor,
    recurrent: tf.Tensor,
    states: Sequence[tf.Tensor],
    matrix: tf.Tensor,
    step: Step,
    keep: tf.Tensor | None = None,
    factor: tf.Tensor | None = None,
) -> list[tf.Tensor]:
    """Runs the loop over the first axis.

    Args:
        z: `[T, B, Z]`. The input's part of the pre-activations.
        recurrent: `[T, B, R]`. Its values are not used. Its gradient is the gradient of `r`.
        states: Initial states, with `h [B, U]` first.
        matrix: `[U, R]`, for `r = (factor * h) matrix`.
        step: Function from `z_t`, `r` and the states to the next states. It may contain products.
        keep: `[T, B, 1]`, tf.bool. The states do not change where it is False. Default None, for
            no mask.
        factor: `[B, U]`, such as a dropout mask. Default None, for 1.

    Returns:
        The states after each step, `[T, B, U]` each.
    """
    # Loops are not unrolled: that would save little time here, and take a second longer to trace.
    length, back = size(z, 0), tf.transpose(matrix)

    def after(t: tf.Tensor, z_t: Any, r: Any, old: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        new = step(z_t, r, list(old))
        if keep is None:
            return new
        return [tf.where(keep[t], a, b) for a, b in zip(new, old, strict=True)]

    @custom_gradient
    def run(z: tf.Tensor, recurrent: tf.Tensor, *initial: tf.Tensor) -> Any:
        specs = [tf.TensorSpec(tensor.shape[1:], tensor.dtype) for tensor in (z, recurrent)]

        def forward(t: tf.Tensor, *old: tf.Tensor) -> tuple[list, list]:
            h = old[0] if factor is None else old[0] * factor
            r = tf.matmul(h, matrix)
            new = after(t, z[t], r, old)
            return new, [r, *new]

        kept = [specs[1], *(tf.TensorSpec(state.shape, state.dtype) for state in initial)]
        _, lists = time_loop.scan(length, forward, initial, kept, unroll=1)
        r, *sequences = (each.stack() for each in lists)

        def backward(*upstream: tf.Tensor) -> tuple:
            def one(t: tf.Tensor, *after_t: tf.Tensor) -> tuple[list, list]:
                ds = [d + more[t] for d, more in zip(after_t, upstream, strict=True)]
                pairs = zip(sequences, initial, strict=True)
                before = [tf.where(t > 0, found[t - 1], first) for found, first in pairs]
                given = [z[t], r[t], *before]
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(given)
                    new = after(t, given[0], given[1], given[2:])
                dz, dr, *ds = tape.gradient(new, given, ds, unconnected_gradients="zero")
                dh = tf.matmul(dr, back)
                ds[0] += dh if factor is None else dh * factor
                return ds, [dz, dr]

            zeros = [tf.zeros_like(state) for state in initial]
            ds, lists = time_loop.scan(length, one, zeros, specs, backwards=True, unroll=1)
            return (*(each.stack() for each in lists), *ds)

        return tuple(sequences), backward

    return list(run(z, recurrent, *states))
