"""Layers that affect their gradients: functions with custom gradients, tapes, branches."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import quick_rows

from conformance.harness import randomize
from tfwd import _keras, layers

pytestmark = pytest.mark.usefixtures("all_large")

X = tf.random.stateless_normal([4, 5], [1, 2])


class OwnGradient(keras.layers.Layer):
    """A layer with a custom gradient that reads weights as attributes or as arguments."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(5, 3), name="kernel")
        self.bias = self.add_weight(shape=(3,), name="bias")

    def call(self, x):
        kernel = tf.convert_to_tensor(self.kernel)
        if self.how == "recomputed":
            return tf.recompute_grad(lambda x: tf.tanh(x @ self.kernel))(x)
        if self.how == "recomputed, in a loop":
            step = tf.recompute_grad(lambda x: tf.tanh(x @ self.kernel))
            return tf.scan(lambda _, row: step(row[tf.newaxis])[0], x, tf.zeros([3]))
        if self.how == "recomputed, as an argument":
            return tf.recompute_grad(lambda x, k: tf.tanh(x @ k + self.bias))(x, kernel)
        if self.how == "plain":
            return tf.tanh(x @ kernel + self.bias)

        @tf.custom_gradient
        def product(x, k):
            return x @ k, lambda dy: (dy @ tf.transpose(self.kernel), tf.transpose(x) @ dy)

        return product(x, kernel)


@quick_rows("recomputed-*", "by hand-False")
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("how", ["recomputed", "recomputed, in a loop", "by hand"])
def test_a_weight_that_is_read_in_backward_is_an_error(how: str, traced: bool) -> None:
    wrapped = layers.WeightDropout(OwnGradient(how), 0.5, weights="kernel")

    def call() -> tf.Tensor:
        return wrapped(X, training=True)

    with pytest.raises(ValueError, match="reads its weight 'kernel' in backward"):
        tf.function(call)() if traced else call()


@pytest.mark.parametrize("traced", [False, True])
def test_another_weight_that_is_read_in_backward_has_its_gradient(traced: bool) -> None:
    gradients = []
    for how in ("plain", "recomputed, as an argument"):
        wrapped = layers.WeightDropout(OwnGradient(how), 0.5, weights="kernel", seed=1)
        wrapped.build(X.shape)
        randomize(wrapped)

        def step(wrapped: keras.Layer = wrapped) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(wrapped(X, training=True) ** 2)
            return tape.gradient(
                loss, [_keras.variables.tf_variable(v) for v in wrapped.trainable_weights]
            )

        if how == "plain":
            gradients.append((tf.function(step) if traced else step)())
            continue
        with pytest.warns(UserWarning, match="reads the variable .*bias.* in backward"):
            gradients.append((tf.function(step) if traced else step)())
    for expected, found in zip(*gradients, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


class Statistic(keras.layers.Layer):
    """A layer that subtracts a mean that it has just updated."""

    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(5, 3), name="kernel")
        self.mean = self.add_weight(shape=(3,), name="mean", trainable=False, initializer="zeros")

    def call(self, x, training=None):
        y = keras.ops.matmul(x, self.kernel)
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(y, 0))
        return y - self.mean


class Branch(keras.layers.Layer):
    """A layer that uses its weight in a branch."""

    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(5, 3), name="kernel")

    def call(self, x):
        kernel = tf.convert_to_tensor(self.kernel)
        return tf.cond(tf.reduce_sum(x) < 1e9, lambda: x @ kernel, lambda: x[:, :3])


class InnerTape(Branch):
    """A layer that returns a gradient with respect to its inputs."""

    def call(self, x):
        kernel = tf.convert_to_tensor(self.kernel)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x @ kernel)
        return tape.gradient(y, x)


@quick_rows("*-eager", "*-graph", "InnerTape-tensor flag")
@pytest.mark.filterwarnings("ignore:.*cannot be run a second time")
@pytest.mark.parametrize("how", ["eager", "graph", "tensor flag", "tensor flag, eager"])
@pytest.mark.parametrize("kind", [Statistic, Branch, InnerTape])
def test_gradients_equal_the_layers_on_the_effective_weights(kind: type, how: str) -> None:
    wrapped = layers.WeightDropout(kind(), 0.5, weights="kernel", seed=1)
    wrapped(X)
    randomize(wrapped)

    def gradients(layer: keras.Layer, training: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(X)
            loss = tf.reduce_sum(layer(X, training=training) ** 2)
        return tape.gradient(loss, [X, _keras.variables.tf_variable(layer.trainable_weights[0])])

    flag = tf.constant(True) if how.startswith("tensor flag") else True
    step = gradients if how.endswith("eager") else tf.function(gradients)
    found = step(wrapped, flag)
    mask = wrapped.effective_weights(0)["kernel"] / _keras.variables.value(wrapped.layer.kernel)
    plain = kind()
    plain(X)
    randomize(plain)
    plain.kernel.assign(wrapped.effective_weights(0)["kernel"])
    options = {} if kind is not Statistic else {"training": True}
    with tf.GradientTape() as tape:
        tape.watch(X)
        loss = tf.reduce_sum(plain(X, **options) ** 2)
    of_x, of_kernel = tape.gradient(loss, [X, _keras.variables.tf_variable(plain.kernel)])
    np.testing.assert_allclose(found[0], of_x, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[1], of_kernel * mask, rtol=1e-4, atol=1e-4)
