"""One tensor in several positions of a wrapped layer's call: a separate gradient for each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import quick_rows

from conformance import harness
from tfwd import _keras, layers
from tfwd._graph import recomputed_weights

pytestmark = pytest.mark.usefixtures("size")

X = tf.random.stateless_normal([2, 4, 6], [1, 2])
S = tf.random.stateless_normal([2, 3], [3, 4])


class Nested(keras.layers.Layer):
    """A layer that takes its tensors out of lists and dicts, and returns one of them twice."""

    def build(self, *shapes) -> None:
        self.kernel = self.add_weight(shape=(6, 3), name="kernel")

    def call(self, pair, named=None):
        first, (second, third) = pair
        y = keras.ops.matmul(first * second + third, self.kernel)
        y = y + keras.ops.sum(named["a"] * named["b"], axis=-1, keepdims=True)
        return [y, y, first]


class Attached(keras.layers.Layer):
    """A layer that uses its argument twice, and a tensor from an attribute."""

    context = None

    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(6, 3), name="kernel")

    def call(self, x):
        return keras.ops.matmul(x * self.context, self.kernel)


class Case(NamedTuple):
    """A layer, and a call that passes one tensor in several positions.

    Attributes:
        make: makes the layer.
        call: calls it with a tensor, the first of `inputs`, and the flag.
        inputs: the tensors.
        weights: the wrapper's option.
    """

    make: Callable[[], keras.Layer]
    call: Callable[..., Any]
    inputs: list[tf.Tensor]
    weights: str | None = None


def two_inputs() -> keras.Model:
    a, b = keras.Input((4, 6)), keras.Input((4, 6))
    return keras.Model([a, b], keras.layers.Dense(3)(a) * keras.layers.Dense(3)(b))


def attach(layer: keras.Layer, x: tf.Tensor, training: bool) -> Any:
    getattr(layer, "layer", layer).context = x
    return layer(x, training=training)


def masked(layer: keras.Layer, x: tf.Tensor, training: bool) -> Any:
    mask = tf.constant([[True, True, False, True], [True, False, False, False]])
    x = tf.identity(x)
    _keras.layers.set_mask(x, mask)
    return layer(x, x, x, training=training)


def attention() -> keras.Layer:
    return keras.layers.MultiHeadAttention(2, 4)


CASES = {
    "query and value": Case(
        attention, lambda layer, x, training: layer(x, x, training=training), [X]
    ),
    "query, key and value": Case(
        attention, lambda layer, x, training: layer(x, x, key=x, training=training), [X]
    ),
    "with a mask": Case(attention, masked, [X]),
    "a model's inputs": Case(
        two_inputs, lambda layer, x, training: layer([x, x], training=training), [X]
    ),
    "first states": Case(
        lambda: keras.layers.LSTM(3),
        lambda layer, x, s, training: layer(x, initial_state=[s, s], training=training),
        [X, S],
    ),
    "lists and dicts": Case(
        Nested,
        lambda layer, x, training: layer([x, [x, x]], named={"a": x, "b": x}, training=training),
        [X],
        "kernel",
    ),
    "an argument and an attribute": Case(Attached, attach, [X], "kernel"),
}


def gradients(
    case: Case, layer: keras.Layer, inputs: list[tf.Tensor], training: bool
) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        loss = harness.loss_of(case.call(layer, *inputs, training=training), [])
    sources = [*inputs, *map(_keras.variables.tf_variable, layer.trainable_weights)]
    return tape.gradient(loss, sources)


def expected(case: Case, wrapped: keras.Layer) -> list[np.ndarray]:
    """Returns gradients of a plain layer with the first call's weights, times the masks."""
    plain = case.make()
    case.call(plain, *case.inputs, training=False)
    values = [np.asarray(v) for v in harness.all_effective(wrapped, 0)]
    factors = [e / np.asarray(w) for e, w in zip(values, wrapped.get_weights(), strict=True)]
    assert any((f == 0).any() for f in factors)
    plain.set_weights(values)
    found = [np.asarray(g) for g in gradients(case, plain, case.inputs, training=False)]
    count = len(case.inputs)
    return [*found[:count], *(g * f for g, f in zip(found[count:], factors, strict=True))]


@quick_rows("large-with a mask-True", "small-query and value-False", "large-lists and dicts-True")
@pytest.mark.filterwarnings("ignore:.*cannot be run a second time")
@pytest.mark.parametrize(
    ("name", "recomputed"), [*((name, True) for name in CASES), ("query and value", False)]
)
def test_each_place_has_a_gradient_of_its_own(name: str, recomputed: bool) -> None:
    case = CASES[name]
    wrapped = layers.WeightDropout(
        case.make(), 0.5, seed=1, recompute=recomputed, weights=case.weights
    )
    case.call(wrapped, *case.inputs, training=False)
    harness.randomize(wrapped)
    wanted = expected(case, wrapped)
    state = _keras.variables.value(wrapped.draws.state)

    @tf.function
    def step(*inputs: tf.Tensor) -> list[tf.Tensor]:
        return gradients(case, wrapped, list(inputs), training=True)

    for run in (step, step.python_function):
        _keras.variables.assign(wrapped.draws.state, state)
        harness.assert_close(run(*case.inputs), wanted, what=name)


@quick_rows("large")
def test_fit_of_self_attention() -> None:
    """Checks that the layer below attention gets the same gradient as below a plain layer."""

    def model(attention: keras.Layer) -> keras.Model:
        inputs = keras.Input((4, 6))
        x = keras.layers.Dense(6, name="below")(inputs)
        made = keras.Model(inputs, attention(x, x))
        made.compile(keras.optimizers.SGD(1.0), "mse")
        return made

    wrapped = layers.WeightDropout(attention(), 0.5, seed=1)
    ours, plain = model(wrapped), model(attention())
    harness.randomize(ours)
    before = ours.get_weights()
    values = [np.asarray(v) for v in harness.all_effective(wrapped, 0)]
    factors = [
        1.0,
        1.0,
        *(e / np.asarray(w) for e, w in zip(values, wrapped.get_weights(), strict=True)),
    ]
    plain.set_weights([*before[:2], *values])
    start = plain.get_weights()
    for one in (ours, plain):
        one.fit(X, tf.zeros([2, 4, 6]), batch_size=2, verbose=0)
    for a, b, c, d, factor in zip(
        ours.get_weights(), before, plain.get_weights(), start, factors, strict=True
    ):
        np.testing.assert_allclose(a - b, (c - d) * factor, rtol=1e-3, atol=1e-6)


@quick_rows("large")
def test_a_variable_at_two_places() -> None:
    """Checks a tensor given twice to `recomputed_weights.call`, not by a call's arguments."""
    w = tf.Variable([1.0, 2.0])

    def draw(training: bool, tensors: list, seeds: list) -> list:
        return [tensors[0] * tensors[1]]

    def function(training: bool, tensors: list, seeds: list, weights: list) -> list:
        return [weights[0] * tensors[1]]

    @tf.function
    def cubed() -> tf.Tensor:
        with tf.GradientTape() as tape:
            raw = tf.convert_to_tensor(w)
            (y,) = recomputed_weights.call(draw, function, True, [raw, raw], [tf.constant([1, 2])])
        return tape.gradient(y, w)

    for gradient in (cubed(), cubed.python_function()):
        np.testing.assert_allclose(gradient, 3 * np.array([1.0, 4.0]), rtol=1e-6)
