"""`VariationalNoise`: its arguments, and the step at which it starts."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfwd import _keras, layers


@pytest.mark.parametrize("traced", [False, True])
def test_before_the_start_it_adds_exactly_nothing(traced: bool) -> None:
    dense = keras.layers.Dense(5, use_bias=False)
    layer = layers.VariationalNoise(dense, 0.1, start_call=2, seed=1)
    x = tf.eye(4)
    evaluated = layer(x)

    def call() -> tf.Tensor:
        return layer(x, training=True)

    call = tf.function(call) if traced else call
    same = [np.array_equal(call(), evaluated) for _ in range(4)]
    assert same == [True, True, False, False]


def test_evaluations_do_not_count_towards_the_start() -> None:
    layer = layers.VariationalNoise(keras.layers.Dense(5), 0.1, start_call=1, seed=1)
    x = tf.ones([1, 3])
    for _ in range(3):
        layer(x)
    np.testing.assert_allclose(layer(x, training=True), layer(x), rtol=1e-6)
    assert not np.allclose(layer(x, training=True), layer(x))


@pytest.mark.parametrize("recompute", [True, False])
def test_the_gradient_passes_unchanged(recompute: bool) -> None:
    layer = layers.VariationalNoise(keras.layers.Dense(5), 0.1, seed=1, recompute=recompute)
    x = tf.random.stateless_normal([3, 4], [1, 2])
    with tf.GradientTape() as tape:
        y = layer(x, training=True)
    gradient = tape.gradient(y, _keras.variables.tf_variable(layer.trainable_weights[0]))
    expected = np.repeat(x.numpy().sum(0)[:, None], 5, axis=1)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_arguments_are_attributes_and_in_the_config() -> None:
    dense = keras.layers.Dense(3)
    layer = layers.VariationalNoise(dense, 0.25, "kernel", 7, "deviation", 5, False, True)
    config = layer.get_config()
    expected = {
        "stddev": 0.25,
        "weights": ["kernel"],
        "start_call": 7,
        "scale": "deviation",
        "seed": 5,
        "recompute": False,
        "share_across_replicas": True,
    }
    assert {key: config[key] for key in expected} == expected
    assert layer.stddev == 0.25


def test_in_multiples_of_the_deviation_of_the_whole_table() -> None:
    """Checks that noise scales with the deviation of the whole table.

    It does so too where an embedding looks a few rows up, and after a round trip by the config.
    """
    plain = keras.layers.Embedding(40, 3)
    layer = layers.VariationalNoise(plain, 0.5, seed=1, scale="deviation")
    layer = layers.VariationalNoise.from_config(layer.get_config())
    ids = tf.constant([[3, 30, 3]])
    layer(ids)
    raw = np.array(layer.get_weights()[0])
    absolute = layers.VariationalNoise(keras.layers.Embedding(40, 3), 0.5 * raw.std(), seed=1)
    absolute(ids)
    absolute.set_weights([raw])
    found = layer(ids, training=True)
    np.testing.assert_allclose(found, absolute(ids, training=True), rtol=1e-5, atol=1e-7)
    assert not np.allclose(found, raw[ids.numpy()])
    expected = absolute.effective_weights(1)["embeddings"]
    np.testing.assert_allclose(layer.effective_weights(1)["embeddings"], expected, rtol=1e-5)
