"""Layers that cannot run on other weights, or not twice, and their detection."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import quick_rows

from conformance.harness import randomize
from tfwd import _keras, layers
from tfwd.layers._substitution import traced_call_analysis

pytestmark = pytest.mark.usefixtures("all_large")

X = tf.random.stateless_normal([4, 5], [1, 2])


class PastKeras(keras.layers.Layer):
    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")
        variable = _keras.variables.tf_variable(self.kernel)
        self.aside = [lambda: variable]

    def call(self, x):
        return tf.matmul(x, self.aside[0]())


@pytest.mark.parametrize("traced", [False, True])
def test_a_weight_that_is_read_past_keras_is_an_error(traced: bool) -> None:
    wrapped = layers.WeightDropout(PastKeras(), 0.5)

    def call() -> tf.Tensor:
        return wrapped(X, training=True)

    with pytest.raises(ValueError, match="reads its weight 'kernel' without Keras"):
        tf.function(call)() if traced else call()


class Unread(keras.layers.Layer):
    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(5, 3), name="kernel")
        self.other = self.add_weight(shape=(5, 3), name="other")

    def call(self, x):
        return keras.ops.matmul(x, self.kernel)


def test_a_weight_that_is_not_read_is_a_warning() -> None:
    wrapped = layers.WeightDropout(Unread(), 0.5)
    with pytest.warns(UserWarning, match="does not read 'other'"):
        wrapped(X, training=True)


class Assigning(keras.layers.Layer):
    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(5, 3), name="kernel")

    def call(self, x):
        self.kernel.assign(self.kernel * 0.9)
        return keras.ops.matmul(x, self.kernel)


def test_a_layer_that_assigns_to_the_parametrized_weight_is_an_error() -> None:
    with pytest.raises(ValueError, match="assigns to its weight 'kernel'"):
        layers.WeightDropout(Assigning(), 0.5)(X, training=True)


class StatefulDraw(keras.layers.Layer):
    """A layer that draws from TensorFlow's global generator in each run."""

    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(5, 3), name="kernel")

    def call(self, x, training=None):
        y = keras.ops.matmul(x, self.kernel)
        return y * tf.random.uniform(tf.shape(y)) if training else y


@pytest.mark.parametrize("traced", [False, True])
def test_a_layer_that_draws_statefully_is_not_run_twice(traced: bool) -> None:
    wrapped = layers.WeightDropout(StatefulDraw(), 0.5, seed=1)
    wrapped.build((None, 5))
    randomize(wrapped)

    def step() -> tuple:
        with tf.GradientTape() as tape:
            y = wrapped(X, training=True)
        return y, tape.gradient(y, _keras.variables.tf_variable(wrapped.weights[0]))

    if traced:  # the layer runs once
        y, gradient = tf.function(step)()
    else:
        with pytest.warns(UserWarning, match="cannot be run a second time in backward, because"):
            y, gradient = step()
    # y = (x w') u, so that the sum over w' of gradient * w' is the sum of y, for the very u.
    kernel = wrapped.weights[0].numpy()
    np.testing.assert_allclose(np.sum(gradient * kernel), np.sum(y), rtol=1e-4)


class Sampled(keras.layers.Layer):
    """A layer that takes rows chosen by a stateful sampler, as a sampled softmax does."""

    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(50, 8), name="kernel")

    def call(self, x):
        true = tf.constant([[1]], tf.int64)
        ids, _, _ = tf.random.uniform_candidate_sampler(true, 1, 5, True, 50)
        return tf.gather(tf.convert_to_tensor(self.kernel), ids) * tf.reduce_sum(x), ids


@pytest.mark.parametrize("pooling", [False, True])
def test_samplers_and_random_pooling_are_not_run_twice(pooling: bool) -> None:
    if pooling:
        layer = keras.Sequential(
            [
                keras.layers.Conv2D(2, 1),
                keras.layers.Lambda(lambda x: tf.nn.fractional_max_pool(x, 1.5, True)[0]),
            ]
        )
        x = tf.random.stateless_normal([2, 9, 9, 1], [1, 2])
    else:
        layer, x = Sampled(), X
    wrapped = layers.WeightDropout(layer, 0.5, weights="kernel")
    wrapped(x)
    with pytest.warns(UserWarning, match="cannot be run a second time"), tf.GradientTape() as tape:
        outputs = wrapped(x, training=True)
    if not pooling:
        rows, ids = outputs
        gradient = tf.convert_to_tensor(
            tape.gradient(rows, _keras.variables.tf_variable(layer.kernel))
        ).numpy()
        assert set(np.flatnonzero(gradient.any(1))) <= set(ids.numpy())


class Table(keras.layers.Layer):
    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(6, 8), name="kernel", initializer="ones")

    def call(self, x):
        return {"table": self.kernel, "inputs": x}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_a_weight_that_is_returned_is_the_effective_one(recompute: bool, traced: bool) -> None:
    wrapped = layers.WeightDropout(Table(), 0.5, weights="kernel", seed=1, recompute=recompute)
    wrapped(X)

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            table = tf.convert_to_tensor(wrapped(X, training=True)["table"])
        return table, tape.gradient(table, _keras.variables.tf_variable(wrapped.layer.kernel))

    table, gradient = tf.function(step)() if traced else step()
    assert set(np.unique(table)) == {0.0, 2.0}
    np.testing.assert_array_equal(gradient, table)


class Caching(keras.layers.Layer):
    """A layer that makes a constant in its first call, and keeps it."""

    positions = None

    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")

    def call(self, x):
        if self.positions is None:
            self.positions = tf.range(3, dtype=tf.float32)
        return tf.matmul(x, self.kernel) + self.positions


def test_a_constant_that_a_layer_keeps_is_not_made_by_the_analysis() -> None:
    layer = Caching()
    wrapped = layers.WeightDropout(layer, 0.5, seed=1)
    with pytest.warns(UserWarning, match="it keeps a tensor in its attribute 'positions'"):
        first = wrapped(X, training=True)
    (kernel,) = wrapped.effective_weights(0).values()
    np.testing.assert_allclose(first, tf.matmul(X, kernel) + tf.range(3.0), rtol=1e-5)
    np.testing.assert_allclose(layer(X), tf.matmul(X, layer.kernel) + tf.range(3.0), rtol=1e-5)


class Untraceable(PastKeras):
    """A layer that needs values while it is called, so that it runs in eager mode only."""

    def __init__(self, past: bool) -> None:
        super().__init__()
        self.past = past

    def call(self, x):
        x = x * float(tf.reduce_sum(x).numpy() < 1e9)
        return super().call(x) if self.past else keras.ops.matmul(x, self.kernel)


def test_a_layer_that_cannot_be_traced() -> None:
    with pytest.warns(UserWarning, match="cannot be traced by itself"):
        layers.WeightDropout(Untraceable(past=False), 0.5)(X, training=True)
    with pytest.raises(ValueError, match="reads its weight 'kernel' without Keras"):
        layers.WeightDropout(Untraceable(past=True), 0.5)(X, training=True)


class PythonInside(Unread):
    def call(self, x):
        def product(x: tf.Tensor) -> tf.Tensor:
            return tf.matmul(x, tf.convert_to_tensor(self.kernel))

        inside = tf.ensure_shape(tf.py_function(product, [x], tf.float32), [4, 3])
        return inside + super().call(x)


def test_python_as_an_operation_is_a_warning() -> None:
    wrapped = layers.WeightDropout(PythonInside(), 0.5, weights="kernel")
    with pytest.warns(UserWarning, match=r"calls Python as an operation .*as an argument"):
        tf.function(lambda: wrapped(X, training=True))()


class TracedMethod(keras.layers.Layer):
    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(5, 3), name="kernel")

    @tf.function
    def product(self, x):
        return tf.matmul(x, tf.convert_to_tensor(self.kernel))

    def call(self, x):
        return self.product(x)


@pytest.mark.parametrize("traced", [False, True])
def test_a_method_that_keeps_what_it_was_traced_with_is_an_error(traced: bool) -> None:
    wrapped = layers.WeightDropout(TracedMethod(), 0.5)

    def call() -> tf.Tensor:
        return wrapped(X, training=True)

    with pytest.raises(ValueError, match="usual cause is a method that is a tf.function"):
        tf.function(call)() if traced else call()


class Doubled(keras.layers.Dense):
    """A custom layer."""

    def call(self, x):
        return 2 * super().call(x)


@quick_rows("False-*-1_0", "True-*-3_1")
@pytest.mark.parametrize(
    ("make", "looks"),
    [
        (lambda: keras.layers.Dense(3), 1),
        (lambda: keras.layers.Dense(3, activation="relu"), 1),
        (lambda: keras.layers.Dense(3, activation=lambda x: x), 3),
        (lambda: Doubled(3), 3),
    ],
)
@pytest.mark.parametrize("traced", [False, True])
def test_one_look_serves_equal_layers_of_keras(
    make: Any, looks: int, traced: bool, monkeypatch: Any
) -> None:
    made = []
    own = traced_call_analysis._analysed
    monkeypatch.setattr(traced_call_analysis, "_shared", {})
    monkeypatch.setattr(traced_call_analysis, "_analysed", lambda *a: (made.append(a), own(*a))[1])
    equal = [layers.WeightDropout(make(), 0.5, weights="kernel") for _ in range(3)]
    wider = layers.WeightDropout(keras.layers.Dense(4), 0.5)

    def call() -> None:
        for layer in equal:
            layer(X, training=True)

    tf.function(call)() if traced else call()
    assert len(made) == looks
    wider(X, training=True)
    assert len(made) == looks + 1
    # A layer that differs from the others now is analysed.
    other = layers.WeightDropout(make(), 0.5, weights="kernel")
    other.layer.activation = lambda x: x
    other(X, training=True)
    assert len(made) == looks + 2


def test_a_warning_is_given_by_each_layer() -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match="does not read 'other'"):
            layers.WeightDropout(Unread(), 0.5)(X, training=True)
