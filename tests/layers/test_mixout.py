"""`Mixout`: the formula of the paper, its arguments and their errors."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from mixout_tools import RATE, X, bias, dense, kept, kernel, published, reference
from stack_marks import quick_rows

from tfwd import _keras, layers
from tfwd import parametrizations as P


@quick_rows("small-None", "large-noise_shape1")
@pytest.mark.parametrize("noise_shape", [None, (None, 1), (1, None)])
def test_the_formula_of_the_paper_and_its_gradient(noise_shape, size: str) -> None:
    layer = dense(noise_shape=noise_shape)
    start, call = reference(layer), layer.calls
    mixed = published(layer, start, call, noise_shape=noise_shape)
    assert 0 < kept(layer, call, noise_shape).mean() < 1
    np.testing.assert_allclose(layer.effective_weights(call)["kernel"], mixed, rtol=1e-5)

    @tf.function(autograph=False)
    def gradient() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(X, training=True)))
        (source,) = (_keras.variables.tf_variable(w) for w in layer.weights[:1])
        return [loss, tape.gradient(loss, source)]

    loss, found = gradient()
    y = X.numpy() @ mixed + bias(layer)
    np.testing.assert_allclose(loss, np.sum(y**2), rtol=1e-5)
    by_hand = X.numpy().T @ (2 * y) * kept(layer, call, noise_shape) / (1 - RATE)
    np.testing.assert_allclose(found, by_hand, rtol=1e-4, atol=1e-5)
    assert np.all(found.numpy()[~kept(layer, call, noise_shape)] == 0.0)


@quick_rows("small-*", "large-None-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("noise_shape", [None, (None, 1)])
def test_towards_zero_it_is_dropout_bit_for_bit(dtype: str, noise_shape, size: str) -> None:
    weight = tf.cast(tf.random.stateless_normal([30, 40], [1, 2]), dtype)
    p, seed = P.Mixout(0.3, noise_shape=noise_shape), tf.constant([5, 6])
    found = p.towards_tensor(tf.zeros([30, 40], dtype))(weight, seed)
    expected = P.Dropout(0.3, noise_shape=noise_shape)(weight, seed)
    np.testing.assert_array_equal(tf.cast(found, tf.float64), tf.cast(expected, tf.float64))


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_rate_of_zero_is_the_identity_bit_for_bit(scheduled: bool, size: str) -> None:
    weight = tf.random.stateless_normal([300], [1, 2]) * 1e-3
    p = P.Mixout((lambda call: 0.0 * tf.cast(call, tf.float32)) if scheduled else 0.0)
    p = p.at(tf.constant(4, tf.int64)).towards_tensor(tf.fill([300], math.pi))
    np.testing.assert_array_equal(p(weight, tf.constant([1, 2])), weight)


def test_the_expectation_is_the_weight_and_the_loss_grows_as_the_paper_says() -> None:
    """Checks that the mean is the weight, and that the loss grows by rate/keep * |w - w0|^2 / 2.

    The paper's bound is an equation for a quadratic loss.
    """
    now, start, draws = np.linspace(-1, 2, 7), np.linspace(1, -0.5, 7), 20000
    p = P.Mixout(RATE).towards_tensor(tf.constant(np.tile(start, (draws, 1))))
    found = p(tf.constant(np.tile(now, (draws, 1))), tf.constant([1, 2]))
    off = found.numpy() - now
    spread = np.sqrt(RATE / (1 - RATE)) * np.abs(now - start)
    assert np.all(np.abs(off.mean(axis=0)) < 5 * spread / np.sqrt(draws))
    loss = 0.5 * np.sum((found.numpy() - 0.3) ** 2, axis=1)
    expected = 0.5 * np.sum((now - 0.3) ** 2) + 0.5 * np.sum(spread**2)
    assert abs(loss.mean() - expected) < 5 * loss.std() / np.sqrt(draws)
    assert expected - 0.5 * np.sum((now - 0.3) ** 2) > 20 * loss.std() / np.sqrt(draws)


def test_half_precision_is_rounded_once(size: str) -> None:
    now, start = (tf.cast(tf.random.stateless_normal([300], [i, 2]), "bfloat16") for i in (1, 2))
    found = P.Mixout(0.5).towards_tensor(start)(now, tf.constant([1, 2]))
    wide = P.Mixout(0.5).towards_tensor(tf.cast(start, tf.float32))
    exact = wide(tf.cast(now, tf.float32), tf.constant([1, 2]))
    np.testing.assert_array_equal(
        tf.cast(found, tf.float32), tf.cast(tf.cast(exact, "bfloat16"), tf.float32)
    )


def test_three_steps_of_training_equal_numpy() -> None:
    layer = layers.Mixout(keras.layers.Dense(4, use_bias=False), RATE, seed=7)
    layer.build((None, 5))
    start = kernel(layer)
    weight, x = start.astype(np.float64), X.numpy().astype(np.float64)
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function(autograph=False)
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(X, training=True) - 1.0))
        sources = [_keras.variables.tf_variable(w) for w in layer.trainable_weights]
        optimizer.apply_gradients(zip(tape.gradient(loss, sources), layer.weights, strict=True))

    for call in range(3):
        m = kept(layer, call)
        mixed = ((1 - m) * start + m * weight - RATE * start) / (1 - RATE)
        weight = weight - 0.1 * (x.T @ (2 * (x @ mixed - 1.0))) * m / (1 - RATE)
        step()
        np.testing.assert_allclose(kernel(layer), weight, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(reference(layer), start)


def test_errors_of_the_rate_and_of_a_missing_reference() -> None:
    with pytest.raises(ValueError, match=r"weight 'kernel' of layer 'inner': rate must be in \[0"):
        layers.Mixout(keras.layers.Dense(4, name="inner"), 1.0)
    with pytest.raises(ValueError, match="has no reference tensor: a layer"):
        P.Mixout(0.5)(tf.ones([3]), tf.constant([1, 2]))


def test_arguments_are_attributes_and_in_the_config() -> None:
    layer = layers.Mixout(
        keras.layers.Dense(4), RATE, "kernel", noise_shape=(None, 1), reference_dtype="bfloat16"
    )
    config = layer.get_config()
    assert config["rate"] == layer.rate == RATE and config["weights"] == ["kernel"]
    assert (config["towards"], config["reference_dtype"]) == ("start", "bfloat16")
    assert tuple(config["noise_shape"]) == (None, 1) and "parametrizations" not in config
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert again.get_config()["rate"] == RATE and isinstance(again, layers.Mixout)
    p = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(P.Mixout(RATE)))
    assert isinstance(p, P.Mixout) and p.rate == RATE
