"""Calls in eager mode: user code runs once, and later changes have no effect.

Each test compares with a plain layer that has the effective weights of the call.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import needs_keras3

from conformance import harness
from tfwd import _keras, layers

pytestmark = pytest.mark.usefixtures("all_large")

X = tf.random.stateless_normal([8, 5], [1, 2])


class OfUser(keras.layers.Layer):
    """A product; subclasses do with it what a custom layer may do."""

    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(5, 3), name="kernel")
        self.begin()
        super().build(shape)

    def begin(self) -> None:
        """Sets attributes."""

    def factor(self, y: tf.Tensor) -> Any:
        """Returns the factor of the product."""
        return 1.0

    def call(self, x):
        y = keras.ops.matmul(x, self.kernel)
        return y * self.factor(y)


class DrawsFromNumPy(OfUser):
    def begin(self) -> None:
        self.generator = np.random.default_rng(3)

    def factor(self, y: tf.Tensor) -> Any:
        own = self.generator.uniform(1, 2, y.shape)
        return (own * np.random.uniform(1, 2, y.shape)).astype("float32")


class Counts(OfUser):
    def begin(self) -> None:
        self.count = 0

    def factor(self, y: tf.Tensor) -> Any:
        self.count += 1
        return float(self.count)


class Scaled(OfUser):
    def begin(self) -> None:
        self.scale = 3.0

    def factor(self, y: tf.Tensor) -> Any:
        return self.scale


class DrawsLater(OfUser):
    """A layer that draws from TensorFlow's generator from its third call on."""

    def begin(self) -> None:
        self.calls_made = 0

    def factor(self, y: tf.Tensor) -> Any:
        self.calls_made += 1
        return tf.random.uniform(y.shape, 1.0, 2.0) if self.calls_made > 2 else 1.0


def nothing(layer: keras.Layer) -> None:
    pass


def rescale(layer: keras.Layer) -> None:
    layer.scale = 7.0


CASES = [(DrawsFromNumPy, nothing), (Counts, nothing), (Scaled, rescale), (DrawsLater, nothing)]


def begin(layer: keras.Layer, inner: keras.Layer) -> None:
    layer.build(X.shape)
    harness.randomize(layer)
    np.random.seed(5)
    tf.random.set_seed(7)


@pytest.mark.parametrize(("kind", "change"), CASES)
def test_gradients_belong_to_the_forward_pass_that_ran(
    kind: type, change: Callable[[Any], None]
) -> None:
    inner, plain = kind(), kind()
    wrapped = layers.WeightDropout(inner, 0.5, weights="kernel", seed=1)

    def steps(layer: keras.Layer, inner: keras.Layer, set_up: Callable) -> list[Any]:
        begin(layer, inner)
        found = []
        for call in range(4):
            set_up(call)
            with tf.GradientTape() as tape:
                tape.watch(X)
                y = layer(X, training=True) if layer is wrapped else layer(X)
                loss = harness.loss_of(y, [])
            change(inner)
            found.append((y, *tape.gradient(loss, [X, _keras.variables.tf_variable(inner.kernel)])))
        return found

    ours = steps(wrapped, inner, lambda call: None)
    raw = np.asarray(_keras.variables.value(inner.kernel))
    weights = [wrapped.effective_weights(call)["kernel"].numpy() for call in range(4)]
    theirs = steps(plain, plain, lambda call: plain.kernel.assign(weights[call]))
    for (y, of_x, of_kernel), (other, x, kernel), weight in zip(ours, theirs, weights, strict=True):
        harness.assert_close([y, of_x, of_kernel], [other, x, kernel * (weight / raw)])


class Norm(keras.Sequential):
    """A custom model: Keras's layers in a class that is not Keras's."""


def normalized(kind: type) -> keras.Model:
    return kind([keras.Input((5,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])


@pytest.mark.parametrize("kind", [keras.Sequential, Norm])
def test_a_layer_that_is_frozen_between_forward_and_backward(kind: type) -> None:
    inner, plain = normalized(kind), normalized(kind)
    wrapped = layers.WeightDropout(inner, 0.5, weights="kernel", seed=1)
    harness.randomize(wrapped)
    plain.set_weights([np.asarray(v) for v in harness.all_effective(wrapped, 0)])
    raw = np.asarray(_keras.variables.value(inner.layers[0].kernel))
    factor = wrapped.effective_weights(0)["kernel"].numpy() / raw
    found = []
    for layer, model in ((wrapped, inner), (plain, plain)):
        norm = model.layers[-1]
        with tf.GradientTape() as tape:
            loss = harness.loss_of(layer(X, training=True), [])
        norm.trainable = False
        kernel = _keras.variables.tf_variable(model.layers[0].kernel)
        found.append(tape.gradient(loss, [kernel, _keras.variables.tf_variable(norm.gamma)]))
        # Attributes that backward changed have the user's values again.
        assert not norm.trainable
    harness.assert_close(found[0][0], found[1][0] * factor)
    harness.assert_close(found[0][1], found[1][1])


@needs_keras3("dropout whose draws can be made again")
def test_a_rate_that_changes_between_forward_and_backward() -> None:
    drop = keras.layers.Dropout(0.5, seed=3)
    inner = keras.Sequential([drop, keras.layers.Dense(1, use_bias=False)])
    wrapped = layers.WeightDropout(inner, 0.5, weights="kernel", seed=1)
    wrapped.build(X.shape)
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = wrapped(X, training=True)
    drop.rate = 0.1
    # y is linear in x, so that the sum over x of gradient * x is the sum of y.
    np.testing.assert_allclose(np.sum(tape.gradient(y, X) * X), np.sum(y), rtol=1e-4)
    assert drop.rate == 0.1


def test_the_look_at_a_first_call_leaves_no_trace() -> None:
    """Checks that the analysis of a first call advances no counter and no generator."""
    for kind in (Counts, DrawsFromNumPy):
        results = []
        for wrap in (False, True):
            inner = kind()
            layer = layers.WeightDropout(inner, 0.0, weights="kernel", seed=1) if wrap else inner
            other = layers.VariationalNoise(layer, 1e-9, weights="kernel") if wrap else layer
            begin(other, inner)
            results.append([other(X, training=True) if wrap else other(X) for _ in range(2)])
        harness.assert_close(results[1], results[0])


class Context(keras.layers.Layer):
    """A layer that adds a tensor from an attribute."""

    context = None

    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(5, 3), name="kernel")

    def call(self, x):
        return keras.ops.matmul(x * self.context, self.kernel)


@pytest.mark.parametrize("traced", [False, True])
def test_a_first_call_without_a_tape_decides_nothing(traced: bool) -> None:
    inner = Context()
    wrapped = layers.WeightDropout(inner, 0.5, weights="kernel", seed=1)
    # Large enough that a graph takes it as an argument and not as a constant.
    x = tf.random.stateless_normal([40, 5], [1, 2])
    inner.context = context = tf.random.stateless_normal([40, 5], [3, 4])
    wrapped.build(x.shape)
    call = tf.function(lambda: wrapped(x, training=True)) if traced else wrapped
    call() if traced else call(x, training=True)
    with tf.GradientTape() as tape:
        tape.watch(context)
        y = call() if traced else call(x, training=True)
    kernel = wrapped.effective_weights(1)["kernel"]
    expected = x * tf.reduce_sum(kernel, 1)
    np.testing.assert_allclose(tape.gradient(y, context), expected, rtol=1e-4, atol=1e-5)


def test_a_context_of_the_same_graph_has_its_gradient() -> None:
    inner = Context()
    wrapped = layers.WeightDropout(inner, 0.5, weights="kernel", seed=1)
    wrapped.build(X.shape)
    inner.context = tf.ones_like(X)
    w = tf.Variable(tf.ones([5, 5]))

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            inner.context = X @ w
            loss = tf.reduce_sum(wrapped(X, training=True))
        inner.context = None
        return tape.gradient(loss, w)

    gradient = step()
    rows = tf.reduce_sum(wrapped.effective_weights(0)["kernel"], 1)
    np.testing.assert_allclose(gradient, tf.transpose(X) @ (X * rows), rtol=1e-4, atol=1e-5)


class OfKeras(keras.layers.Dense):
    """A Keras layer under a custom name."""


def replaced_on_the_instance(units: int) -> keras.Layer:
    dense = keras.layers.Dense(units)
    own = dense.call
    dense.call = lambda *args, **kwargs: own(*args, **kwargs)
    return dense


@pytest.mark.parametrize(
    ("make", "runs"),
    [
        (keras.layers.Dense, 2),
        (OfKeras, 1),
        (replaced_on_the_instance, 1),
        (lambda units: keras.layers.Dense(units, activation=lambda x: x), 1),
        (lambda units: keras.Sequential([keras.layers.Dense(units)]), 2),
        (lambda units: keras.Sequential([OfKeras(units)]), 1),
    ],
)
def test_what_a_user_wrote_runs_once(make: Callable, runs: int, monkeypatch: Any) -> None:
    """Checks that custom code runs once.

    Keras's own code runs again, so that no effective weight is stored.
    """
    made = []
    own = keras.layers.Dense.call

    @functools.wraps(own)
    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return own(*args, **kwargs)

    counting.__signature__ = inspect.signature(own)
    monkeypatch.setattr(keras.layers.Dense, "call", counting)
    wrapped = layers.WeightDropout(make(3), 0.5, weights="kernel", seed=1)
    for _ in range(2):
        made.clear()
        with tf.GradientTape() as tape:
            y = wrapped(X, training=True)
        tape.gradient(y, [_keras.variables.tf_variable(w) for w in wrapped.trainable_weights])
    assert len(made) == runs


def test_recompute_can_be_set_later() -> None:
    """Checks that forward-mode derivatives work with recompute=False, and not with True."""
    layer = layers.WeightDropout(keras.layers.Dense(3), 0.5, seed=1)
    layer(X)

    def derivative() -> tf.Tensor:
        with tf.autodiff.ForwardAccumulator(X, tf.ones_like(X)) as accumulator:
            y = layer(X, training=True)
        return accumulator.jvp(y)

    refused = pytest.raises(NotImplementedError, match="set recompute=False in the layer")
    with refused:
        derivative()
    layer.recompute = False
    kernel = layer.effective_weights(layer.calls)["kernel"]
    np.testing.assert_allclose(derivative(), tf.ones_like(X) @ kernel, rtol=1e-5)
    layer.recompute = True
    with refused:
        derivative()
