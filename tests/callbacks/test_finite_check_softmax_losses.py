"""`FiniteCheck` and `Probes` keep the logits from which Keras computes a cross-entropy.

From the clipped outputs of a softmax, the loss of a certain wrong answer would be 16.1, with a
gradient of 0. The oracle is the same model without checks.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from finite_check_fits import MODES
from tables_by_make_target import with_slow_rest

from tfwd.callbacks import FiniteCheck
from tfwd.layers import CheckFinite
from tfwd.numerics import Probes


class Twice(keras.layers.Layer):
    def call(self, x):
        return 2.0 * x


class OwnSoftmax(keras.layers.Layer):
    def call(self, x):
        return tf.nn.softmax(x)


class OwnSigmoid(keras.layers.Layer):
    def call(self, x):
        return tf.sigmoid(x)


def dense(units, activation):
    wide = keras.initializers.RandomNormal(stddev=30.0, seed=2)
    return keras.layers.Dense(units, activation=activation, kernel_initializer=wide)


# The last layers and the loss.
OUTPUTS = {
    "sparse": (lambda: [dense(3, "softmax")], "sparse_categorical_crossentropy"),
    "one-hot": (lambda: [dense(3, "softmax")], "categorical_crossentropy"),
    "binary": (lambda: [dense(1, "sigmoid")], "binary_crossentropy"),
    "own softmax": (lambda: [dense(3, None), OwnSoftmax()], "sparse_categorical_crossentropy"),
    "own sigmoid": (lambda: [dense(1, None), OwnSigmoid()], "binary_crossentropy"),
    "activation": (
        lambda: [dense(3, None), keras.layers.Softmax()],
        "sparse_categorical_crossentropy",
    ),
}


def data(loss):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 4)).astype("float32")
    labels = rng.integers(0, 2 if loss.startswith("binary") else 3, size=(16, 1))
    return x, np.eye(3, dtype="float32")[labels[:, 0]] if loss.startswith("cat") else labels


def make(outputs):
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), Twice(), *outputs()])


@pytest.mark.parametrize("mode", ["graph", "eager", "xla"])
@pytest.mark.parametrize("name", with_slow_rest(OUTPUTS, {"sparse", "own sigmoid"}))
def test_a_fit_has_the_same_loss_and_weights(name, mode):
    outputs, loss = OUTPUTS[name]
    x, y = data(loss)
    results = []
    for callbacks in ([], [FiniteCheck()]):
        model = make(outputs)
        model.compile(keras.optimizers.SGD(0.01), loss, **MODES[mode])
        fitted = model.fit(
            x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks
        )
        results.append((fitted.history["loss"], model.get_weights()))
    (plain, plain_weights), (checked, checked_weights) = results
    assert max(plain) > 1.0
    np.testing.assert_allclose(checked, plain, rtol=1e-6)
    for one, other in zip(checked_weights, plain_weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
@pytest.mark.parametrize("name", with_slow_rest(OUTPUTS, {"one-hot", "own softmax"}))
def test_probes_keep_the_gradient(name, eager):
    outputs, loss = OUTPUTS[name]
    x, y = data(loss)
    results = []
    for is_checked in (False, True):
        model, function = make(outputs), keras.losses.get(loss)
        checks = Probes(model) if is_checked else contextlib.nullcontext()

        def step(x, y, model=model, function=function, checks=checks):
            with checks, tf.GradientTape() as tape:
                value = tf.reduce_mean(function(y, model(x, training=True)))
            return value, tape.gradient(value, model.trainable_variables)

        results.append((step if eager else tf.function(step))(tf.constant(x), tf.constant(y)))
    (plain, gradients), (checked, checked_gradients) = results
    np.testing.assert_allclose(checked, plain, rtol=1e-6)
    for one, other in zip(checked_gradients, gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("action", ["raise", "count"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
@pytest.mark.parametrize("name", with_slow_rest(OUTPUTS, {"sparse", "own sigmoid"}))
def test_a_check_after_a_softmax_changes_nothing(name, eager, action):
    outputs, loss = OUTPUTS[name]
    x, y = data(loss)
    results = []
    for last in ([], [CheckFinite(action)]):
        model = make(lambda last=last: [*outputs(), *last])
        model.compile(keras.optimizers.SGD(0.01), loss, run_eagerly=eager, jit_compile=False)
        fitted = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        results.append((fitted.history["loss"], model.trainable_variables))
    (plain, plain_weights), (checked, checked_weights) = results
    np.testing.assert_allclose(checked, plain, rtol=1e-6)
    for one, other in zip(checked_weights, plain_weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_check_after_a_softmax_finds_a_bad_gradient():
    model = make(lambda: [dense(3, "softmax"), CheckFinite("count", name="check")])
    with tf.GradientTape() as tape:
        loss = keras.losses.sparse_categorical_crossentropy(
            tf.constant([[1]]), model(tf.ones([1, 4]))
        )
        loss = tf.reduce_sum(loss) * np.inf
    tape.gradient(loss, model.trainable_variables)
    assert "backward pass" in model.get_layer("check").report()


class Positions(keras.Model):
    """A model whose layers take, and return, eager tensors that its constructor made."""

    def __init__(self):
        super().__init__()
        self.numbers = tf.range(4)
        self.table = Returning(tf.random.stateless_normal([4, 3], [1, 2]))
        self.embedding, self.last = keras.layers.Embedding(4, 3), keras.layers.Dense(1)

    def call(self, x):
        return self.last(x[:, :, tf.newaxis] + self.embedding(self.numbers) + self.table(x))


class Returning(keras.layers.Layer):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def call(self, x):
        return self.value


class SetsShape(keras.layers.Layer):
    def call(self, x):
        shaped = tf.nn.softmax(tf.reshape(x, tf.stack([tf.shape(x)[0], -1])))
        shaped.set_shape([None, 4])
        return shaped


@pytest.mark.parametrize("mode", ["graph", "eager", "xla"])
@pytest.mark.parametrize("kind", ["positions", "shape"])
def test_constants_and_shapes_of_a_graph(kind, mode):
    x, y = np.ones((8, 4), "float32"), np.ones((8, 4, 1), "float32")
    losses = []
    for callbacks in ([], [FiniteCheck()]):
        keras.utils.set_random_seed(1)
        if kind == "positions":
            model = Positions()
        else:
            model = keras.Sequential([keras.Input((4,)), SetsShape(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **MODES[mode])
        labels = y if kind == "positions" else y[:, 0]
        losses += model.fit(x, labels, epochs=2, verbose=0, callbacks=callbacks).history["loss"]
    np.testing.assert_allclose(losses[:2], losses[2:], rtol=1e-6)
