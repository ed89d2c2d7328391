"""Masks: a wrapped layer gets the masks that the plain layer gets from Keras, and returns the same.

The oracle is a plain layer with the effective weights assigned by hand.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from masked_calls_table import CASES, SIZE, Kernel, Two, mask_of
from stack_marks import quick_rows, rest

from tfwd import layers

X = tf.random.stateless_normal(SIZE, [1, 2])
Y = tf.random.stateless_normal(SIZE, [3, 4])
MASK = tf.constant([[True, False, True], [True, True, False]])
OTHER = tf.constant([[False, True, True], [True, True, False]])

pytestmark = pytest.mark.filterwarnings("ignore:.*does not support masking.*:UserWarning")


def set_random(layer: keras.layers.Layer) -> None:
    draws = np.random.default_rng(5)
    layer.set_weights([draws.normal(0.0, 0.5, w.shape) for w in layer.get_weights()])


def to_effective(plain: keras.layers.Layer, wrapped: Any, call: int) -> None:
    """Assigns the weights of a training call to a plain layer that is built alike."""
    found = wrapped.effective_weights(call)
    values = []
    for value, weight in zip(plain.get_weights(), wrapped.weights, strict=True):
        path = getattr(weight, "path", weight.name.partition(":")[0])
        ends = [name for name in found if f"/{path}".endswith(f"/{name}")]
        values.append(found[ends[0]].numpy() if ends else value)
    assert found
    plain.set_weights(values)


def observed(call: Any, layer: Any, masked: bool, training: bool) -> tuple[list, list]:
    """Returns the results of a call: its outputs, and all masks of outputs and inputs."""
    x, y = tf.identity(X), tf.identity(Y)
    x._keras_mask = tf.identity(MASK)
    if masked:
        y._keras_mask = tf.identity(OTHER)
    outputs = tf.nest.flatten(call(layer, x, y, tf.identity(OTHER), training=training))
    return outputs, [mask_of(tensor) for tensor in (*outputs, x, y)]


def assert_alike(found: tuple[list, list], expected: tuple[list, list]) -> None:
    assert [m is None for m in found[1]] == [m is None for m in expected[1]]
    for a, b in zip(found[1], expected[1], strict=True):
        np.testing.assert_array_equal(a, b) if a is not None else None
    for a, b in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def pair(make: Any, call: Any, masked: bool) -> tuple[Any, Any]:
    """Returns a plain layer, and a wrapped layer with the same weights."""
    plain, inner = make(), make()
    for layer in (plain, inner):
        observed(call, layer, masked, False)
    set_random(plain)
    inner.set_weights(plain.get_weights())
    return plain, layers.VariationalNoise(inner, 0.5, weights=".*(kernel|scale)", seed=1)


# Layers that are called in a graph too, with two masks: one for each way to treat a mask.
TRACED = ("lstm states", "heads of three", "two and mask", "two masks", "list", "takes", "puts")
SETTINGS = [(case, False) for case in CASES] + [
    pytest.param(case, True, marks=rest) for case in TRACED
]


@quick_rows(
    "lstm-*",
    "lstm states-*",
    "lstm both-*",
    "gru-*",
    "bidirectional-*",
    "each step-*",
    "heads-*",
    "heads of two-*",
    "heads mask-*",
    "grouped mask-*",
    "two*",
    "one or two*",
    "list*",
    "tuple*",
    "dict*",
    "takes*",
    "puts*",
    "same*",
    "not the same*",
    "unmasking*",
)
@pytest.mark.parametrize(("case", "traced"), SETTINGS)
def test_masks_equal_the_plain_layers(case: str, traced: bool) -> None:
    make, call = CASES[case]
    plain, wrapped = pair(make, call, traced)

    def found(training: bool) -> tuple[list, list]:
        return observed(call, wrapped, traced, training)

    if not traced:
        assert_alike(found(False), observed(call, plain, traced, False))
    to_effective(plain, wrapped, 0)
    expected = observed(call, plain, traced, True)
    assert_alike(tf.function(found)(True) if traced else found(True), expected)


LAYERS_IN_A_ROW = {
    "attention": lambda: keras.layers.MultiHeadAttention(2, 3),
    "lstm": lambda: keras.layers.LSTM(4, return_sequences=True),
    "two": Two,
}


@quick_rows("lstm", "two")
@pytest.mark.parametrize("second", LAYERS_IN_A_ROW)
def test_a_layer_sees_what_the_one_before_it_has_left(second: str) -> None:
    """Checks masks of the layer before, in a fitted functional model and under a tensor flag."""
    firsts = [keras.layers.MultiHeadAttention(2, 3) for _ in range(2)]
    seconds = [LAYERS_IN_A_ROW[second]() for _ in range(2)]

    def model(first: Any, second: Any) -> keras.Model:
        ids = keras.layers.Input([3], dtype="int32")
        h = embedding(ids)
        joined = first(h, h)
        is_recurrent = isinstance(getattr(second, "layer", second), keras.layers.LSTM)
        return keras.Model(ids, second(h) if is_recurrent else second(joined, h))

    embedding = keras.layers.Embedding(9, 4, mask_zero=True)
    plain = model(firsts[0], seconds[0])
    wrapped_layers = [
        layers.VariationalNoise(layer, 0.5, weights=".*kernel", seed=seed)
        for seed, layer in enumerate((firsts[1], seconds[1]))
    ]
    wrapped = model(*wrapped_layers)
    for a, b in zip((*firsts[:1], *seconds[:1]), (firsts[1], seconds[1]), strict=True):
        set_random(a)
        b.set_weights(a.get_weights())
    ids = tf.constant([[1, 0, 2], [3, 4, 0]])
    np.testing.assert_allclose(wrapped(ids), plain(ids), atol=1e-5)
    for a, b in zip((firsts[0], seconds[0]), wrapped_layers, strict=True):
        to_effective(a, b, 0)
    expected = plain(ids, training=True)
    np.testing.assert_allclose(wrapped(ids, training=True), expected, atol=1e-5)


@quick_rows("wrapped-*")
@pytest.mark.parametrize(("kind", "state"), [("wrapped", True), ("own class", False)])
def test_a_flag_that_is_a_tensor_changes_no_mask(kind: str, state: bool) -> None:
    if kind == "wrapped":
        layer: Any = keras.layers.LSTM(4, return_sequences=True)
        layer = layers.WeightDropout(layer, 0.5, seed=1)
    else:
        layer = layers.WeightDropLSTM(4, weight_dropout=0.5, return_sequences=True, seed=1)
    given = {"initial_state": [tf.ones([2, 4])] * 2} if state else {}

    def call(training: Any) -> tuple[list, list]:
        return observed(lambda f, x, y, m, **k: f(x, **given, **k), layer, False, training)

    call(False)
    traced = tf.function(call)
    for training in (False, True):
        layer.draws.state.assign([1, 0])
        expected = call(training)
        layer.draws.state.assign([1, 0])
        assert_alike(traced(tf.constant(training)), expected)


@dataclasses.dataclass
class Held:
    product: Any


class InDataclass(Kernel):
    def call(self, a):
        return Held(self.times(a))


def test_a_mask_that_a_dataclass_gets_in_a_branch_stays_there() -> None:
    """Checks that a mask on a dataclass in a branch stays in the branch.

    Keras sets it on the dataclass itself. Nothing outside can use that tensor.
    """
    layer = layers.WeightDropout(InDataclass(), 0.5, seed=1)

    def call(training: Any) -> Any:
        x = tf.identity(X)
        x._keras_mask = tf.identity(MASK)
        return mask_of(layer(x, training=training))

    assert call(False) is not None
    assert tf.function(call)(tf.constant(True)) is None
