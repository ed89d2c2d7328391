"""Layers that draw inside `tf.recompute_grad` and `keras.remat`, against finite differences."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2, needs_keras3

import tfwd
from tfwd import layers
from tfwd import parametrizations as P

X = np.random.default_rng(0).normal(size=(4, 5)).astype("float32")
ERROR = "is called in training inside tf.recompute_grad or keras.remat"
REMAT = tf.recompute_grad if IS_KERAS_2 else keras.remat
DRAWING = {
    "dense": lambda: layers.WeightDropout(keras.layers.Dense(3), 0.5, seed=1),
    "noise": lambda: layers.VariationalNoise(keras.layers.Dense(3), 0.1, seed=1),
    "both": lambda: layers.Parametrized(
        keras.layers.Dense(3), {"kernel": P.Chain([P.WeightNorm(axis=-1), P.Dropout(0.5)])}, seed=1
    ),
    "locked": lambda: layers.LockedDropout(0.5, seed=1),
}


class Holds(keras.layers.Layer):
    """A layer that recomputes the layer in it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, inputs, training=None):
        run = tf.recompute_grad(lambda x: self.inner(x, training=training))
        return run(inputs * tf.convert_to_tensor(self.scale))


def taken(run, layer, traced):
    """Returns a function that computes the gradients of the layer's weights."""

    def step(x):
        sources = [tfwd._keras.variables.tf_variable(v) for v in layer.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.reduce_sum(run(x) ** 2)
        return tape.gradient(value, [x, *sources])

    return tf.function(step) if traced else step


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("kind", DRAWING)
def test_a_training_call_that_would_be_made_again_is_an_error(kind, traced):
    layer = DRAWING[kind]()
    x = tf.constant(X[:, None] if kind == "locked" else X)
    layer(x)
    training_call = lambda x: layer(x, training=True)  # noqa: E731
    for run in (tf.recompute_grad(training_call), REMAT(training_call)):
        with pytest.raises(ValueError, match=ERROR):
            taken(run, layer, traced)(x)
    tf.recompute_grad(lambda x: tf.identity(layer(x)))(x)  # evaluation
    assert int(layer.calls) == 0


def test_a_layer_inside_that_is_recomputed():
    inner = layers.WeightDropout(keras.layers.Dense(3), 0.5, seed=1)
    for outer in (Holds(inner), layers.WeightDropout(Holds(inner), 0.5, weights="scale", seed=2)):
        with pytest.raises(ValueError, match=ERROR):
            outer(X, training=True)


@needs_keras3("keras.RematScope")
def test_a_scope_in_which_layers_are_recomputed():
    with keras.RematScope(mode="full"):
        model = keras.Sequential(
            [keras.Input((5,)), layers.WeightDropout(keras.layers.Dense(1), 0.5, seed=1)]
        )
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match=ERROR):
        model.fit(X, X[:, :1], verbose=0)


@pytest.mark.parametrize("traced", [False, True])
def test_a_parametrization_that_draws_nothing_can_be_recomputed(traced):
    layer = layers.Parametrized(keras.layers.Dense(3), {"kernel": P.WeightNorm(axis=-1)})
    layer(X)
    run = tf.recompute_grad(lambda x: layer(x, training=True))
    gradients = taken(run, layer, traced)(tf.constant(X))[1:]
    found = [np.asarray(gradient, np.float64) for gradient in gradients]
    for variable, gradient in zip(layer.trainable_variables, found, strict=True):
        held = variable.numpy()
        direction = np.random.default_rng(1).normal(size=held.shape)
        ends = []
        for sign in (1e-2, -1e-2):
            variable.assign(held + sign * direction)
            ends.append(float(tf.reduce_sum(layer(X) ** 2)))
        variable.assign(held)
        expected = (ends[0] - ends[1]) / 2e-2
        np.testing.assert_allclose((gradient * direction).sum(), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("is_differentiated_before", [False, True])
def test_a_function_that_was_traced_before_is_not_seen(is_differentiated_before, traced):
    """Checks the limit in `docs/weight_dropout.md`: backward then draws the next mask."""

    def made():
        layer = layers.WeightDropout(keras.layers.Dense(3, use_bias=False), 0.5, seed=1)
        layer.build((None, 5))
        layer.layer.set_weights([np.arange(1.0, 16.0).reshape(5, 3)])
        return layer

    other = made()
    # A dropped weight is 0 and another weight is doubled, so the outputs for rows of the unit
    # matrix show the masks.
    masks = [np.array(other(np.eye(5, dtype="float32"), training=True)) for _ in range(4)]
    kernel = np.array(other.layer.kernel)
    masks = [mask / kernel for mask in masks]
    assert {*masks[1].ravel(), *masks[2].ravel()} == {0.0, 2.0}
    layer = made()
    function = tf.function(lambda x: layer(x, training=True), autograph=False)
    first = tf.constant(X)
    if is_differentiated_before:
        taken(function, layer, traced=False)(first)
    else:
        function(first)  # the first call of training
    run = tf.recompute_grad(function)
    of_inputs, of_kernel = taken(run, layer, traced)(first)

    def gradients(forward, backward):
        x = X.astype(np.float64)
        upstream = 2.0 * x @ (kernel * masks[forward])
        return upstream @ (kernel * masks[backward]).T, (x.T @ upstream) * masks[backward]

    found = [of_inputs, of_kernel] if traced else [of_inputs]
    assert traced or of_kernel is None  # as for a plain layer
    for value, wrong, right in zip(found, gradients(1, 2), gradients(1, 1), strict=False):
        np.testing.assert_allclose(value, wrong, rtol=1e-4, atol=1e-2)
        assert abs(wrong - right).max() > 1.0
    assert int(layer.calls) == 3
