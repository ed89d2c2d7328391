"""`Mixout` under replicas, XLA and loops, in wrappers and in embeddings."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from mixout_tools import RATE, X, bias, kernel, move, published, reference, trained
from replicas import two_replicas
from stack_marks import extended, quick_rows

import tfwd
from tfwd import _keras, layers
from tfwd import parametrizations as P


def test_replicas_have_one_reference() -> None:
    strategy = two_replicas()
    with strategy.scope():
        layer = layers.Mixout(keras.layers.Dense(4), RATE, seed=7)
        layer.build((None, 5))
    start = kernel(layer)
    step = tf.function(lambda: layer(X, training=True), autograph=False)
    first = strategy.experimental_local_results(strategy.run(step))
    np.testing.assert_allclose(first[0], first[1], rtol=1e-6)  # no weight has changed yet
    with strategy.scope():
        layer.weights[0].assign_add(tf.ones([5, 4]))
    call, mixed = layer.calls, layer.effective_weights(layer.calls)["kernel"]
    for copy in strategy.experimental_local_results(layer.references.all()[0]):
        np.testing.assert_array_equal(copy, start)
    one, other = strategy.experimental_local_results(strategy.run(step))
    np.testing.assert_allclose(one, X.numpy() @ mixed.numpy(), rtol=1e-5, atol=1e-5)
    assert not np.allclose(one, other)  # they draw by themselves
    np.testing.assert_allclose(mixed, published(layer, start, call), rtol=1e-5, atol=1e-6)


# In and around other layers.


@extended
def test_in_a_wrapper_and_around_one(size: str) -> None:
    """Checks that there is no warning, and that references do not prevent recomputation."""
    inner = layers.Mixout(keras.layers.Dense(4, name="inner"), RATE, seed=1)
    model = keras.Sequential([keras.Input((5,)), inner, keras.layers.Dense(2, name="out")])
    outer = layers.WeightDropout(model, 0.5, weights="out/kernel", seed=2)
    outer(X, training=True)
    start = kernel(inner)
    np.testing.assert_array_equal(reference(inner), start)
    move(inner)
    for function in (outer, tf.function(outer, autograph=False)):
        call = outer.calls
        (of_out,) = outer.effective_weights(call).values()
        hidden = X.numpy() @ published(inner, start, call) + bias(inner)
        found = function(X, training=True)
        np.testing.assert_allclose(found, hidden @ of_out.numpy(), rtol=1e-4, atol=1e-5)
    # The same weight in both: the inner first, and the reference is what is raw.
    both = layers.Mixout(layers.WeightDropout(keras.layers.Dense(4), 0.5, seed=3), RATE, seed=4)
    both(X, training=True)
    start = kernel(both)
    np.testing.assert_array_equal(reference(both), start)
    move(both)
    dropped = both.layer.effective_weights(1)["kernel"].numpy()
    found = both.effective_weights(1)["kernel"].numpy()
    to_start, moved = (
        np.isclose(found, start),
        np.isclose(found, start + (dropped - start) / (1 - RATE), rtol=1e-4, atol=1e-5),
    )
    assert np.all(to_start | moved) and 0 < to_start.mean() < 0.6
    np.testing.assert_allclose(
        both(X, training=True), X.numpy() @ found + bias(both), rtol=1e-4, atol=1e-5
    )


def test_a_layer_that_is_called_twice_has_one_reference_and_two_masks() -> None:
    layer = layers.Mixout(keras.layers.Dense(5, use_bias=False), RATE, seed=7)
    twice = tf.function(lambda: layer(layer(X, training=True), training=True), autograph=False)
    start_product = twice()
    start = kernel(layer)
    np.testing.assert_allclose(start_product, X.numpy() @ start @ start, rtol=1e-4, atol=1e-5)
    move(layer)
    first, second = (published(layer, start, call) for call in (2, 3))
    assert not np.allclose(first, second)
    np.testing.assert_allclose(twice(), X.numpy() @ first @ second, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(reference(layer), start)


@pytest.mark.parametrize("noise_shape", [None, (None, 1)])
def test_an_embedding_mixes_the_rows_that_it_looks_up(noise_shape) -> None:
    layer = layers.Mixout(keras.layers.Embedding(9, 4), RATE, noise_shape=noise_shape, seed=7)
    ids = tf.constant([[1, 7, 1], [0, 8, 8]])
    layer(ids, training=True)
    start = kernel(layer)
    move(layer)
    mixed = published(layer, start, 1, noise_shape=noise_shape)
    variable = _keras.variables.tf_variable(layer.weights[0])
    with tf.GradientTape() as tape:
        found = layer(ids, training=True)
    np.testing.assert_allclose(found, mixed[ids.numpy()], rtol=1e-4, atol=1e-5)
    assert isinstance(tape.gradient(found, variable), tf.IndexedSlices)


@quick_rows("small")
def test_compiled_by_xla(size: str) -> None:
    layer = layers.Mixout(keras.layers.Dense(4, use_bias=False), RATE, seed=7)
    layer.build((None, 5))
    start = kernel(layer)
    variable = _keras.variables.tf_variable(layer.weights[0])

    @tf.function(jit_compile=True, autograph=False)
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = layer(X, training=True)
        variable.assign_sub(0.1 * tape.gradient(y, variable))
        return y

    np.testing.assert_allclose(step(), X.numpy() @ start, rtol=1e-4, atol=1e-5)
    assert not np.allclose(kernel(layer), start)
    mixed = published(layer, start, 1)
    np.testing.assert_allclose(step(), X.numpy() @ mixed, rtol=1e-4, atol=1e-5)


@extended
def test_a_training_flag_that_is_a_tensor_and_a_loop() -> None:
    layer = layers.Mixout(keras.layers.Dense(5, use_bias=False), RATE, seed=7)
    call = tf.function(lambda x, flag: layer(x, training=flag), autograph=False)
    call(X, tf.constant(False))
    loaded = np.eye(5, dtype="float32")
    layer.set_weights([loaded])
    call(X, tf.constant(True))
    np.testing.assert_array_equal(reference(layer), loaded)
    move(layer)
    np.testing.assert_allclose(call(X, tf.constant(False)), layer.layer(X), rtol=1e-6)
    found = call(X, tf.constant(True))
    np.testing.assert_allclose(found, X.numpy() @ published(layer, loaded, 1), rtol=1e-4, atol=1e-5)

    @tf.function(autograph=False)
    def loop() -> tf.Tensor:
        return tf.while_loop(
            lambda i, x: i < 2, lambda i, x: (i + 1, layer(x, training=True)), [0, X]
        )[1]

    first, second = (published(layer, loaded, call) for call in (2, 3))
    np.testing.assert_allclose(loop(), X.numpy() @ first @ second, rtol=1e-4, atol=1e-4)


def test_moments_of_gradients_begin_too() -> None:
    model = trained()
    start = kernel(model.layers[0])
    tfwd.gradients.moments(model, X, tf.ones([3, 1]), "mse", training=True)
    assert reference(model.layers[1]).shape == (4, 1)
    rounded = tf.cast(tf.cast(start, tf.bfloat16), tf.float32)
    np.testing.assert_array_equal(reference(model.layers[0]), rounded)


def test_parametrize_takes_it() -> None:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, name="a")])
    start = kernel(model)
    mixed = tfwd.parametrize(model, {"kernel": P.Mixout(RATE)}, seed=1)
    mixed(X, training=True)
    move(model)
    (layer,) = (x for x in _keras.layers.all_layers(mixed) if hasattr(x, "effective_weights"))
    expected = X.numpy() @ published(layer, start, 1) + bias(model)
    np.testing.assert_allclose(mixed(X, training=True), expected, rtol=1e-4, atol=1e-5)
