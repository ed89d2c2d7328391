"""Rules for recurrent layers: the products of all time steps at once, outside the loop.

The kernel gets the outer products of the inputs and of the gradients at the pre-activations, the
recurrent kernel those of the states before each step, summed over time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras_calls
from tfwd.gradients.record import Call
from tfwd.gradients.registry import rule
from tfwd.gradients.rules_dense import plain
from tfwd.gradients.scan import Step, scan
from tfwd.gradients.terms import Given, Outer, Scale, Term, size, wide


class Sequence(NamedTuple):
    """A recurrent layer's call, as far as it is alike for all.

    Attributes:
        x: the inputs `[B, T, I]` in the order of the loop, dropped if the cell drops them.
        states: the initial states.
        keep: `[T, B, 1]`, tf.bool, or None.
        factor: what the cell's dropout multiplies the state by, or None.
    """

    x: tf.Tensor
    states: list[tf.Tensor]
    keep: tf.Tensor | None
    factor: tf.Tensor | None


def sequence(
    layer: Any, sequences: tf.Tensor, initial_state: Any, mask: Any, training: Any
) -> Sequence | None:
    """What goes into the loop; None for what the rules do not cover."""
    cell = layer.cell
    dropped = bool(training) and (cell.dropout > 0 or cell.recurrent_dropout > 0)
    if not plain(cell.kernel) or (dropped and getattr(cell, "implementation", 2) == 1):
        return None
    states = _keras_calls.initial_states(layer, sequences, initial_state)
    factors = (None, None)
    if dropped:
        factors = _keras_calls.recurrent_dropout(layer, sequences, states)
    x = sequences if factors[0] is None else sequences * factors[0][:, tf.newaxis]
    mask = mask[0] if isinstance(mask, (list, tuple)) else mask
    if mask is not None:
        mask = tf.transpose(tf.cast(mask, tf.bool))[..., tf.newaxis]
    if layer.go_backwards:
        x = tf.reverse(x, [1])
        mask = None if mask is None else tf.reverse(mask, [0])
    return Sequence(x, states, mask, factors[1])


def outputs(layer: Any, given: Sequence, states: list[tf.Tensor]) -> Any:
    """What the layer returns, from the states `[T, B, U]` after each step; stores the last ones."""
    values = states[0]
    if given.keep is not None:
        # Keras repeats the output before a masked step, and begins with zeros.
        seen = given.keep
        if not layer.zero_output_for_mask:
            seen = tf.cumsum(tf.cast(seen, tf.int32), 0) > 0
        values = tf.where(seen, values, tf.zeros_like(values))
    last = [tf.cast(state[-1], layer.compute_dtype) for state in states]
    if layer.stateful:
        for variable, value in zip(keras.tree.flatten(layer.states), last, strict=True):
            variable.assign(value)
    output = tf.transpose(values, [1, 0, 2]) if layer.return_sequences else values[-1]
    output = tf.cast(output, layer.compute_dtype)
    return (output, *last) if layer.return_state else output


def project(layer: Any, call: Call, x: tf.Tensor, bias: tf.Tensor | None) -> tf.Tensor:
    """`x W + b` of all time steps, `[B, T, Z]`, a probe."""
    z = tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), call.value(layer.cell.kernel))
    z = z if bias is None else z + bias
    z = call.probe(tf.reshape(z, [size(x, 0), size(x, 1), z.shape[-1]]))
    call.use(layer.cell.kernel, z, lambda d: Outer(x, d))
    return z


def previous(given: Sequence, states: tf.Tensor) -> tf.Tensor:
    """What the recurrent kernel was multiplied with at each step, `[B, T, U]`."""
    before = tf.concat([given.states[0][tf.newaxis], states[:-1]], 0)
    before = before if given.factor is None else before * given.factor
    return tf.transpose(before, [1, 0, 2])


def summed(d: tf.Tensor) -> Term:
    """A bias that is added at every step."""
    return Given(tf.reduce_sum(wide(d), 1))


def _single(layer: Any, call: Call, given: Sequence, states: list[tf.Tensor], step: Step) -> Any:
    """A layer whose two products are added up: one gradient serves both."""
    cell = layer.cell
    z = project(layer, call, given.x, call.value(cell.bias) if cell.use_bias else None)
    matrix = call.value(cell.recurrent_kernel)
    time_major = tf.transpose(z, [1, 0, 2])
    found = scan(
        time_major, tf.zeros_like(time_major), given.states, matrix, step, given.keep, given.factor
    )
    call.use(cell.recurrent_kernel, z, lambda d: Outer(previous(given, found[0]), d))
    if cell.use_bias:
        call.use(cell.bias, z, summed)
    return outputs(layer, given, found)


@rule(keras.layers.SimpleRNN)
def simple_rnn(
    layer: Any,
    call: Call,
    sequences: tf.Tensor,
    initial_state: Any = None,
    mask: Any = None,
    training: Any = False,
) -> Any:
    """`h = activation(x W + h U + b)`."""
    given = None
    if type(layer.cell) is keras.layers.SimpleRNNCell:
        given = sequence(layer, sequences, initial_state, mask, training)
    if given is None:
        return NotImplemented
    activation = layer.cell.activation or keras.activations.linear

    def step(z: tf.Tensor, r: tf.Tensor, states: list[tf.Tensor]) -> list[tf.Tensor]:
        return [activation(z + r)]

    return _single(layer, call, given, given.states, step)


@rule(keras.layers.LSTM)
def lstm(
    layer: Any,
    call: Call,
    sequences: tf.Tensor,
    initial_state: Any = None,
    mask: Any = None,
    training: Any = False,
) -> Any:
    """Gates in the order i, f, c, o of `x W + h U + b`."""
    given = None
    if type(layer.cell) is keras.layers.LSTMCell:
        given = sequence(layer, sequences, initial_state, mask, training)
    if given is None:
        return NotImplemented
    activation, gate = layer.cell.activation, layer.cell.recurrent_activation

    def step(z: tf.Tensor, r: tf.Tensor, states: list[tf.Tensor]) -> list[tf.Tensor]:
        i, f, new, o = tf.split(z + r, 4, axis=1)
        c = gate(f) * states[1] + gate(i) * activation(new)
        return [gate(o) * activation(c), c]

    return _single(layer, call, given, given.states, step)


@rule(keras.layers.GRU)
def gru(
    layer: Any,
    call: Call,
    sequences: tf.Tensor,
    initial_state: Any = None,
    mask: Any = None,
    training: Any = False,
) -> Any:
    """Gates in the order z, r, h; with `reset_after` the candidate's product is reset, else `h`."""
    given = None
    if type(layer.cell) is keras.layers.GRUCell:
        given = sequence(layer, sequences, initial_state, mask, training)
    if given is None:
        return NotImplemented
    run = _gru_reset_after if layer.cell.reset_after else _gru_reset_before
    return run(layer, call, given, layer.cell.activation, layer.cell.recurrent_activation)


def _gru_reset_after(
    layer: Any, call: Call, given: Sequence, activation: Callable, gate: Callable
) -> Any:
    cell = layer.cell
    # Two rows: the bias of the inputs' product, and that of the state's.
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
    call.use(cell.recurrent_kernel, recurrent, lambda d: Outer(previous(given, found[0]), d))
    if cell.use_bias:
        call.use(
            cell.bias,
            (z, recurrent),
            lambda d, e: Given(tf.stack([tf.reduce_sum(wide(d), 1), tf.reduce_sum(wide(e), 1)], 1)),
        )
    return outputs(layer, given, found)


def _gru_reset_before(
    layer: Any, call: Call, given: Sequence, activation: Callable, gate: Callable
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

    def term(d: tf.Tensor) -> Term:
        h = previous(given, found[0])
        r = tf.matmul(tf.reshape(h, [-1, units]), gates)
        r = tf.reshape(r, [size(h, 0), size(h, 1), 2 * units])
        return Columns([Outer(h, d[..., : 2 * units]), Outer(reset(z, r, h), d[..., 2 * units :])])

    call.use(cell.recurrent_kernel, z, term)
    if cell.use_bias:
        call.use(cell.bias, z, summed)
    return outputs(layer, given, found)


class Columns(Term):
    """Terms of the parts of a weight, side by side along its last axis."""

    def __init__(self, terms: list[Term]) -> None:
        self.terms, self.batch = terms, terms[0].batch
        self.shape = (*terms[0].shape[:-1], sum(term.shape[-1] for term in terms))

    def sums(self, scale: Scale = 1.0) -> tuple[tf.Tensor, tf.Tensor]:
        first, second = zip(*(term.sums(scale) for term in self.terms), strict=True)
        return tf.concat(first, -1), tf.concat(second, -1)

    def total(self, scale: Scale = 1.0) -> tf.Tensor:
        return tf.concat([term.total(scale) for term in self.terms], -1)

    def part(self, start: int | tf.Tensor, size: int | tf.Tensor) -> Term:
        return Columns([term.part(start, size) for term in self.terms])

    def gradients(self) -> tf.Tensor:
        return tf.concat([term.gradients() for term in self.terms], -1)
