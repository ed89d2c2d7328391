"""`calls` with a rate of 0: training calls count, and the layer equals the plain layer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfwd import layers

X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
IDS = np.array([[0, 1, 2], [3, 4, 5]])
LAYERS = {
    "weight dropout": (lambda: layers.WeightDropout(keras.layers.Dense(2), 0.0), X),
    "noise": (lambda: layers.VariationalNoise(keras.layers.Dense(2), 0.0), X),
    "mixout": (lambda: layers.Mixout(keras.layers.Dense(2), 0.0), X),
    "embedding": (lambda: layers.DropoutEmbedding(6, 2, 0.0), IDS),
    "LSTM": (lambda: layers.WeightDropLSTM(2, 0.0), X),
    "locked": (lambda: layers.LockedDropout(0.0), X),
    "nested": (
        lambda: layers.WeightDropout(layers.WeightDropout(keras.layers.Dense(2), 0.0), 0.0),
        X,
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_training_calls_count_without_a_rate(kind):
    make, x = LAYERS[kind]
    layer, x = make(), tf.constant(x)
    plain = np.asarray(layer(x))
    assert int(layer.calls) == 0  # evaluation
    counts = []
    traced = tf.function(lambda x, training: layer(x, training=training))
    for call in (
        lambda: layer(x, training=True),
        lambda: traced(x, True),
        lambda: traced(x, True),
        lambda: traced(x, tf.constant(True)),
        lambda: traced(x, tf.constant(False)),
        lambda: layer(x, training=False),
    ):
        np.testing.assert_allclose(call(), plain, rtol=1e-6, atol=1e-7)
        counts.append(int(layer.calls))
    assert counts == [1, 2, 3, 4, 4, 4]
