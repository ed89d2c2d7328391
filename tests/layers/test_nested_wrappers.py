"""Nested wrappers form one chain, the inner first."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import extended

from conformance.harness import randomize
from tfwd import _keras, layers
from tfwd import parametrizations as P


def test_nested_wrappers_are_one_chain_the_inner_first() -> None:
    noisy = layers.VariationalNoise(keras.layers.Dense(40), 0.3, seed=1)
    wrapped = layers.WeightDropout(noisy, 0.5, seed=2)
    x = tf.eye(50)
    wrapped.build(x.shape)
    randomize(wrapped)
    wrapped.weights[1].assign(tf.zeros([40]))
    kernel = wrapped.effective_weights(0)["kernel"].numpy()
    assert abs((kernel == 0).mean() - 0.5) < 5 * 0.5 / np.sqrt(2000)
    noise = (kernel * 0.5 - wrapped.weights[0].numpy())[kernel != 0] / 0.3
    assert abs(noise.var() - 1) < 5 * np.sqrt(2 / 1000)
    with tf.GradientTape() as tape:
        y = wrapped(x, training=True)
    np.testing.assert_allclose(y, kernel, atol=1e-6)
    gradient = tape.gradient(y, _keras.variables.tf_variable(wrapped.weights[0])).numpy()
    np.testing.assert_allclose(gradient, np.where(kernel == 0, 0.0, 2.0))
    assert (wrapped.calls, noisy.calls) == (1, 1)


def test_the_other_order_has_no_zeros() -> None:
    dropped = layers.WeightDropout(keras.layers.Dense(40), 0.5, seed=1)
    wrapped = layers.VariationalNoise(dropped, 0.3, seed=2)
    x = tf.eye(50)
    y = wrapped(x, training=True).numpy()
    np.testing.assert_allclose(y, wrapped.effective_weights(0)["kernel"], atol=1e-6)
    assert (y != 0).all()
    assert len(set(dropped.effective_weights(0)) | {"kernel"}) == 1


def test_alike_nested_wrappers_with_one_seed_are_independent() -> None:
    inner = layers.WeightDropout(keras.layers.Dense(40, use_bias=False), 0.5, seed=1)
    wrapped = layers.WeightDropout(inner, 0.5, seed=1)
    zeros = (wrapped(tf.eye(50), training=True).numpy() == 0).mean()
    assert abs(zeros - 0.75) < 5 * np.sqrt(0.1875 / 2000)


@extended
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("traced", [False, True])
def test_a_wrapper_inside_a_nested_sequential_that_is_wrapped_again(
    recompute: bool, traced: bool
) -> None:
    options = {"recompute": recompute}
    noisy = layers.VariationalNoise(keras.layers.Dense(40, use_bias=False), 0.3, seed=1, **options)
    inner = keras.Sequential([noisy, keras.layers.Dense(2, use_bias=False)])
    model = keras.Sequential([inner])
    wrapped = layers.WeightDropout(model, 0.5, weights=".*kernel", seed=2, **options)
    x = tf.eye(50)
    wrapped.build(x.shape)
    randomize(wrapped)
    first, second = wrapped.effective_weights(0).values()

    def step() -> tuple:
        with tf.GradientTape() as tape:
            y = wrapped(x, training=True)
        return y, tape.gradient(y, [_keras.variables.tf_variable(w) for w in wrapped.weights])

    y, (one, two) = tf.function(step)() if traced else step()
    np.testing.assert_allclose(y, first @ second, rtol=1e-4)
    assert abs((first.numpy() == 0).mean() - 0.5) < 5 * 0.5 / np.sqrt(2000)
    ones = tf.ones([50, 2])
    np.testing.assert_allclose(
        one, np.where(first.numpy() == 0, 0, 2 * (ones @ tf.transpose(second))), rtol=1e-4
    )
    np.testing.assert_allclose(
        two, np.where(second.numpy() == 0, 0, 2 * (tf.transpose(first) @ ones)), rtol=1e-4
    )


def test_a_frozen_bias_that_is_large_in_a_branch() -> None:
    def dense() -> keras.Model:
        first, second = keras.Input((4,)), keras.Input((4,))
        hidden = keras.layers.Dense(4, activation="tanh", name="hidden")
        head = keras.layers.Dense(1 << 16, activation="tanh", name="head")
        head.trainable = False
        return keras.Model([first, second], head(first + hidden(second)))

    plain = dense()
    dropped = layers.Parametrized(dense(), {".*": P.Dropout(0.5)}, seed=1)
    wrapped = layers.WeightDropout(dropped, 0.0, weights=".*kernel", seed=2)
    x, y = tf.random.stateless_normal((2, 2, 4), [0, 1])
    wrapped([x, y])
    weights = dropped.effective_weights(0)
    names = ["hidden/kernel", "hidden/bias", "head/kernel", "head/bias"]
    plain.set_weights([weights[name] for name in names])

    @tf.function(autograph=False)
    def gradients(model: keras.layers.Layer, training: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            loss = tf.reduce_sum(tf.square(model([x, y], training=training)))
        return tape.gradient(loss, [x, y])

    found = gradients(wrapped, tf.constant(True))
    for one, expected in zip(found, gradients(plain, False), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-2)
