"""Rule for GRU, with the reset gate after or before the recurrent product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfwd.dtypes import at_least_float32
from tfwd.gradients.gradient_forms import (
    Materialized,
    OuterProduct,
    PerExampleGradient,
    Scale,
    size,
)
from tfwd.gradients.recorded_pass import Call
from tfwd.gradients.rules.recurrent_common import (
    LoopInputs,
    outputs,
    previous,
    project,
    sequence,
    summed,
)
from tfwd.gradients.rules.recurrent_scan import scan
from tfwd.gradients.rules.registry import rule


@rule(keras.layers.GRU)
def gru(layer: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    """Computes a GRU with gates in the order z, r, h.

    With `reset_after`, the reset gate multiplies the candidate's product. Otherwise it multiplies
    `h`.
    """
    given = sequence(layer, keras.layers.GRUCell, *args, **kwargs)
    if given is None:
        return NotImplemented
    run = _gru_reset_after if layer.cell.reset_after else _gru_reset_before
    return run(layer, call, given, layer.cell.activation, layer.cell.recurrent_activation)


def _gru_reset_after(
    layer: Any, call: Call, given: LoopInputs, activation: Callable, gate: Callable
) -> Any:
    cell = layer.cell
    # Two rows: the bias of the inputs' product, and the bias of the state's product.
    biases = call.value(cell.bias) if cell.use_bias else None
    z = project(layer, call, given.x, None if biases is None else biases[0])
    matrix = call.value(cell.recurrent_kernel)

    def step(z: tf.Tensor, r: tf.Tensor, states: list[tf.Tensor]) -> list[tf.Tensor]:
        r = r if biases is None else r + biases[1]
        (z_update, z_reset, z_new), (update, reset, new) = (tf.split(t, 3, axis=1) for t in (z, r))
        update, reset = gate(z_update + update), gate(z_reset + reset)
        new = activation(z_new + reset * new)
        return [update * states[0] + (1 - update) * new]

    time_major = tf.transpose(z, [1, 0, 2])
    recurrent = call.probe(tf.zeros_like(z))
    found = scan(
        time_major,
        tf.transpose(recurrent, [1, 0, 2]),
        given.states,
        matrix,
        step,
        given.keep,
        given.factor,
    )
    call.use(cell.recurrent_kernel, recurrent, lambda d: OuterProduct(previous(given, found[0]), d))
    if cell.use_bias:
        call.use(
            cell.bias,
            (z, recurrent),
            lambda *both: Materialized(
                tf.stack([tf.reduce_sum(at_least_float32(d), 1) for d in both], 1)
            ),
        )
    return outputs(layer, given, found)


def _gru_reset_before(
    layer: Any, call: Call, given: LoopInputs, activation: Callable, gate: Callable
) -> Any:
    cell = layer.cell
    z = project(layer, call, given.x, call.value(cell.bias) if cell.use_bias else None)
    kernel, units = call.value(cell.recurrent_kernel), cell.units
    gates, candidate = kernel[:, : 2 * units], kernel[:, 2 * units :]

    def reset(z: tf.Tensor, r: tf.Tensor, h: tf.Tensor) -> tf.Tensor:
        return gate(z[..., units : 2 * units] + r[..., units:]) * h

    def step(z: tf.Tensor, r: tf.Tensor, states: list[tf.Tensor]) -> list[tf.Tensor]:
        h = states[0]
        update = gate(z[:, :units] + r[:, :units])
        new = activation(z[:, 2 * units :] + tf.matmul(reset(z, r, h), candidate))
        return [update * h + (1 - update) * new]

    time_major = tf.transpose(z, [1, 0, 2])
    unused = tf.zeros_like(time_major[..., : 2 * units])
    found = scan(time_major, unused, given.states, gates, step, given.keep)

    def term(d: tf.Tensor) -> PerExampleGradient:
        h = previous(given, found[0])
        r = tf.matmul(tf.reshape(h, [-1, units]), gates)
        r = tf.reshape(r, [size(h, 0), size(h, 1), 2 * units])
        return ConcatenatedGradient(
            [
                OuterProduct(h, d[..., : 2 * units]),
                OuterProduct(reset(z, r, h), d[..., 2 * units :]),
            ]
        )

    call.use(cell.recurrent_kernel, z, term)
    if cell.use_bias:
        call.use(cell.bias, z, summed)
    return outputs(layer, given, found)


class ConcatenatedGradient(PerExampleGradient):
    """Terms of the parts of a weight, concatenated along the weight's last axis."""

    def __init__(self, terms: list[PerExampleGradient]) -> None:
        self.terms, self.batch = terms, terms[0].batch
        self.shape = (*terms[0].shape[:-1], sum(term.shape[-1] for term in terms))

    def sums(self, scale: Scale = 1.0) -> tuple[tf.Tensor, tf.Tensor]:
        first, second = zip(*(term.sums(scale) for term in self.terms), strict=True)
        return tf.concat(first, -1), tf.concat(second, -1)

    def total(self, scale: Scale = 1.0) -> tf.Tensor:
        return tf.concat([term.total(scale) for term in self.terms], -1)

    def part(self, start: int | tf.Tensor, size: int | tf.Tensor) -> PerExampleGradient:
        return ConcatenatedGradient([term.part(start, size) for term in self.terms])

    def gradients(self) -> tf.Tensor:
        return tf.concat([term.gradients() for term in self.terms], -1)
