"""A recurrent loop whose gradient goes to the pre-activations and to nothing else.

At each step `r = product(h)`, then `states = step(z_t, r, states)`. Forward keeps `r` and the
states. Backward goes through the elementwise `step` again and through one product a step; the
gradients at `z` and at `r`, which it has anyway, are all that the weights' gradients are made of,
and these are products over all time steps, outside the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfwd.custom_gradient import custom_gradient
from tfwd.gradients.per_example_gradients import size

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
        z: `[T, B, Z]`, the input's part of the pre-activations.
        recurrent: `[T, B, R]`, of any value: its gradient is that at `r`.
        states: the initial states, `h [B, U]` first.
        matrix: `[U, R]`; `r = (factor * h) matrix`.
        step: from `z_t`, `r` and the states to the next states. It may hold products of its own.
        keep: `[T, B, 1]`, tf.bool: where False the states stay.
        factor: `[B, U]`, such as a dropout mask.

    Returns:
        The states after each step, `[T, B, U]` each.
    """
    length = size(z, 0)
    kwargs = {"parallel_iterations": 1, "maximum_iterations": length}
    back = tf.transpose(matrix)

    def kept(index: tf.Tensor, new: list[tf.Tensor], old: list[tf.Tensor]) -> list[tf.Tensor]:
        if keep is None:
            return new
        return [tf.where(keep[index], a, b) for a, b in zip(new, old, strict=True)]

    def after(index: tf.Tensor, z_t: Any, r: Any, old: list[tf.Tensor]) -> list[tf.Tensor]:
        return kept(index, step(z_t, r, old), old)

    @custom_gradient
    def run(z: tf.Tensor, recurrent: tf.Tensor, *initial: tf.Tensor) -> Any:
        def forward(index: tf.Tensor, products: Any, arrays: Any, old: Any) -> tuple:
            h = old[0] if factor is None else old[0] * factor
            r = tf.matmul(h, matrix)
            new = after(index, z[index], r, list(old))
            arrays = [array.write(index, state) for array, state in zip(arrays, new, strict=True)]
            return index + 1, products.write(index, r), arrays, new

        arrays = [_array(length, state.shape, state.dtype) for state in initial]
        products = _array(length, [*initial[0].shape[:1], matrix.shape[1]], z.dtype)
        _, products, arrays, _ = tf.while_loop(
            lambda index, *_: index < length,
            forward,
            (tf.constant(0), products, arrays, list(initial)),
            **kwargs,
        )
        sequences = [array.stack() for array in arrays]
        r = products.stack()

        def backward(*upstream: tf.Tensor) -> tuple:
            def one(count: tf.Tensor, z_array: Any, r_array: Any, ds: Any) -> tuple:
                index = length - 1 - count
                ds = [d + more[index] for d, more in zip(ds, upstream, strict=True)]
                first = [tf.where(index > 0, s[index - 1], i) for s, i in before]
                given = [z[index], r[index], *first]
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(given)
                    new = after(index, given[0], given[1], given[2:])
                dz, dr, *ds = tape.gradient(new, given, ds, unconnected_gradients="zero")
                dh = tf.matmul(dr, back)
                ds[0] += dh if factor is None else dh * factor
                return count + 1, z_array.write(index, dz), r_array.write(index, dr), ds

            before = list(zip(sequences, initial, strict=True))
            _, z_array, r_array, ds = tf.while_loop(
                lambda count, *_: count < length,
                one,
                (
                    tf.constant(0),
                    _array(length, z.shape[1:], z.dtype),
                    _array(length, r.shape[1:], r.dtype),
                    [tf.zeros_like(state) for state in initial],
                ),
                **kwargs,
            )
            return (z_array.stack(), r_array.stack(), *ds)

        return tuple(sequences), backward

    return list(run(z, recurrent, *states))


def _array(length: int | tf.Tensor, shape: Any, dtype: tf.DType) -> tf.TensorArray:
    return tf.TensorArray(dtype, length, element_shape=shape, clear_after_read=False)
