"""Common code of the rules for recurrent layers: inputs of the loop, products and outputs.

The products for the weights' gradients cover all time steps at once, outside the loop. The kernel
gets the outer products of the inputs and the pre-activations' gradients. The recurrent kernel gets
the outer products of the states before each step and these gradients. Both are summed over time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfwd._keras import recurrent_layers
from tfwd.dtypes import at_least_float32
from tfwd.gradients.gradient_forms import Materialized, OuterProduct, PerExampleGradient, size
from tfwd.gradients.recorded_pass import Call
from tfwd.gradients.rules.dense import plain
from tfwd.gradients.rules.recurrent_scan import Step, scan


class LoopInputs(NamedTuple):
    """Inputs of a recurrent layer's loop, for all kinds of layers.

    Attributes:
        x: Inputs `[B, T, I]` in the order of the loop, after the cell's dropout.
        states: Initial states.
        keep: `[T, B, 1]`, tf.bool, or None.
        factor: Factor of the state from the cell's dropout, or None.
    """

    x: tf.Tensor
    states: list[tf.Tensor]
    keep: tf.Tensor | None
    factor: tf.Tensor | None


def sequence(layer: Any, kind: type[Any], *args: Any, **kwargs: Any) -> LoopInputs | None:
    """Returns the inputs of the loop, or None for cases that the rules do not cover.

    Args:
        layer: Layer.
        kind: Class of the cell for the rule.
        *args, **kwargs: Arguments of the layer's call.
    """
    cell = layer.cell
    given = recurrent_layers.recurrent_arguments(layer, *args, **kwargs)
    if type(cell) is not kind or given is None:
        return None
    sequences, initial_state, mask, training = given
    dropped = bool(training) and (cell.dropout > 0 or cell.recurrent_dropout > 0)
    if not plain(cell.kernel) or (dropped and getattr(cell, "implementation", 2) == 1):
        return None
    states = recurrent_layers.initial_states(layer, sequences, initial_state)
    factors = (None, None)
    if dropped:
        factors = recurrent_layers.recurrent_dropout(layer, sequences, states)
    x = sequences if factors[0] is None else sequences * factors[0]
    mask = mask[0] if isinstance(mask, (list, tuple)) else mask
    if mask is not None:
        mask = tf.transpose(tf.cast(mask, tf.bool))[..., tf.newaxis]
    if layer.go_backwards:
        x = tf.reverse(x, [1])
        mask = None if mask is None else tf.reverse(mask, [0])
    return LoopInputs(x, states, mask, factors[1])


def outputs(layer: Any, given: LoopInputs, states: list[tf.Tensor]) -> Any:
    """Returns the layer's result from the states `[T, B, U]`, and stores the last states."""
    values = states[0]
    if given.keep is not None:
        # Keras repeats the output before a masked step. The first output is zero.
        seen = given.keep
        if not layer.zero_output_for_mask:
            seen = tf.cumsum(tf.cast(seen, tf.int32), 0) > 0
        values = tf.where(seen, values, tf.zeros_like(values))
    last = [tf.cast(state[-1], layer.compute_dtype) for state in states]
    if layer.stateful:
        for variable, value in zip(tf.nest.flatten(layer.states), last, strict=True):
            variable.assign(value)
    output = tf.transpose(values, [1, 0, 2]) if layer.return_sequences else values[-1]
    output = tf.cast(output, layer.compute_dtype)
    return (output, *last) if layer.return_state else output


def project(layer: Any, call: Call, x: tf.Tensor, bias: tf.Tensor | None) -> tf.Tensor:
    """Computes `x W + b` of all time steps, `[B, T, Z]`, as a probe."""
    z = tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), call.value(layer.cell.kernel))
    z = z if bias is None else z + bias
    z = call.probe(tf.reshape(z, [size(x, 0), size(x, 1), z.shape[-1]]))
    call.use(layer.cell.kernel, z, lambda d: OuterProduct(x, d))
    return z


def previous(given: LoopInputs, states: tf.Tensor) -> tf.Tensor:
    """Returns the states that multiply the recurrent kernel at each step, `[B, T, U]`."""
    before = tf.concat([given.states[0][tf.newaxis], states[:-1]], 0)
    before = before if given.factor is None else before * given.factor
    return tf.transpose(before, [1, 0, 2])


def summed(d: tf.Tensor) -> PerExampleGradient:
    """Returns the gradient of a bias that is added at every step."""
    return Materialized(tf.reduce_sum(at_least_float32(d), 1))


def sum_of_products(
    layer: Any, call: Call, given: LoopInputs, states: list[tf.Tensor], step: Step
) -> Any:
    """Computes a layer that adds its two products. Both products then have the same gradient."""
    cell = layer.cell
    z = project(layer, call, given.x, call.value(cell.bias) if cell.use_bias else None)
    matrix = call.value(cell.recurrent_kernel)
    time_major = tf.transpose(z, [1, 0, 2])
    found = scan(
        time_major, tf.zeros_like(time_major), given.states, matrix, step, given.keep, given.factor
    )
    call.use(cell.recurrent_kernel, z, lambda d: OuterProduct(previous(given, found[0]), d))
    if cell.use_bias:
        call.use(cell.bias, z, summed)
    return outputs(layer, given, found)
