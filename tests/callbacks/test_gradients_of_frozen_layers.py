"""Non-finite gradients between layers: a gradient counts only if it reaches trainable weights.

The oracle is Keras without the callback.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError, Probes

layers = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 6)).astype("float32")
Y = X[:, :1]


class Root(layers.Layer):
    """The derivative is infinite at 0, as relu returns it."""

    def call(self, x):
        return keras.ops.sqrt(x) if hasattr(keras, "ops") else x**0.5


def model_of(frozen, eager, *, behind=False):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    x = layers.Dense(5, name="first")(inputs) if behind else inputs
    x = layers.Dense(4, "relu", name="base", trainable=not frozen)(x)
    outputs = layers.Dense(1, name="head")(Root(name="root")(x))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=eager)
    return model


def fit(model, *callbacks):
    model.fit(X, Y, epochs=3, verbose=0, shuffle=False, batch_size=8, callbacks=list(callbacks))
    return [np.asarray(weight) for weight in model.get_weights()]


@pytest.mark.parametrize("eager", [False, True])
def test_a_custom_layer_on_frozen_layers(eager):
    """The gradient of the frozen layer's output is infinite, and no weight depends on it."""
    expected = fit(model_of(True, eager))
    assert all(np.isfinite(weight).all() for weight in expected)
    check = FiniteCheck("skip")
    found = fit(model_of(True, eager), check)
    assert check.skipped == 0
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def two_branches(eager):
    """A trained branch, and then a frozen one with the custom layer."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    x = inputs
    for name in ("first", "second", "third"):  # Keras calls the first of them before the base
        x = layers.Dense(4, name=name)(x)
    y = layers.Dense(4, "relu", name="base", trainable=False)(inputs)
    outputs = layers.Dense(1, name="head")(layers.Concatenate()([x, Root(name="root")(y)]))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eager)
    return model


@pytest.mark.parametrize("eager", [False, True])
def test_a_frozen_branch_after_a_trained_one(eager):
    expected = fit(two_branches(eager))
    found = fit(two_branches(eager), FiniteCheck())
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Block(layers.Layer):
    """A layer with an own weight before its inner layers."""

    def __init__(self):
        super().__init__(name="block")
        self.relu, self.root = layers.ReLU(), Root(name="root")

    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(6, 4), initializer="glorot_uniform")
        self.built = True

    def call(self, x):
        return self.root(self.relu(x @ self.w))


def test_a_weight_of_the_layer_around_the_custom_layer():
    """XLA's relu makes 0 of the infinite gradient, so no gradient of a weight shows it."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), Block(), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(NonFiniteError) as caught:
        fit(model, FiniteCheck())
    assert "backward gradient for the output of 'block/" in caught.value.report.sentence


def test_probes_measure_gradients_of_frozen_layers():
    model = model_of(True, False)
    probes = Probes(model)
    with probes, tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(tf.constant(X)) - Y) ** 2)
        tape.gradient(loss, model.get_layer("base").weights + model.trainable_weights)
    report = probes.report()
    frames = [one.frame for one in report.found if one.frame.kind == "gradient"]
    assert "base" in [frame.name for frame in frames]


@pytest.mark.parametrize("behind", [False, True], ids=["base", "first"])
def test_a_weight_before_the_custom_layer(behind):
    """The base has weights, or a layer before the frozen base has."""
    with pytest.raises(NonFiniteError) as caught:
        fit(model_of(behind, False, behind=behind), FiniteCheck())
    assert (
        "layer 'root': backward gradient for the output of 'base'" in caught.value.report.sentence
    )
