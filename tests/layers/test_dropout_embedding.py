"""Dropout of whole words: the same draws as the wrapper's, with a sparse gradient."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfwd import _keras, layers
from tfwd import parametrizations as P

IDS = tf.constant([[0, 3, 3, 7], [7, 1, 0, 2]])


def both(seed: int = 5, rate: float = 0.5) -> tuple[keras.Layer, keras.Layer]:
    own = layers.DropoutEmbedding(9, 4, rate, seed=seed)
    dropped = {"embeddings": P.Dropout(rate, noise_shape=(None, 1))}
    wrapped = layers.Parametrized(keras.layers.Embedding(9, 4), dropped, seed=seed)
    own.build(None)
    wrapped.build(None)
    own.embeddings.assign(np.arange(1.0, 37.0).reshape(9, 4))
    wrapped.set_weights(own.get_weights())
    return own, wrapped


@pytest.mark.parametrize("traced", [False, True])
def test_it_is_the_wrapper_draw_for_draw(traced: bool) -> None:
    results = []
    for layer in both():

        def step(layer: keras.Layer = layer) -> tuple:
            with tf.GradientTape() as tape:
                y = layer(IDS, training=True)
                loss = tf.reduce_sum(y**2)
            return y, tf.convert_to_tensor(
                tape.gradient(loss, _keras.variables.tf_variable(layer.trainable_weights[0]))
            )

        step = tf.function(step) if traced else step
        results.append([x for _ in range(3) for x in step()])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_rows_are_dropped_whole_and_alike_everywhere_in_the_batch() -> None:
    layer = layers.DropoutEmbedding(2000, 4, 0.3, seed=1, embeddings_initializer="ones")
    y = layer(tf.stack([tf.range(2000), tf.range(2000)]), training=True).numpy()
    np.testing.assert_array_equal(y[0], y[1])
    assert ((y == 0).all(-1) | (y != 0).all(-1)).all()
    assert abs((y[0, :, 0] == 0).mean() - 0.3) < 5 * math.sqrt(0.21 / 2000)


def test_effective_weights() -> None:
    layer, _ = both()
    effective = layer.effective_weights(0)["embeddings"]
    np.testing.assert_allclose(layer(IDS, training=True), tf.gather(effective, IDS))


@pytest.mark.parametrize("recompute", [True, False])
def test_the_gradient_stays_sparse(recompute: bool) -> None:
    layer = layers.DropoutEmbedding(9, 4, 0.5, seed=1, recompute=recompute)
    with tf.GradientTape() as tape:
        y = layer(IDS, training=True)
    gradient = tape.gradient(y, _keras.variables.tf_variable(layer.embeddings))
    assert isinstance(gradient, tf.IndexedSlices)
    assert gradient.values.shape == [8, 4]
    np.testing.assert_array_equal(
        (gradient.values.numpy() == 0).all(-1), (y.numpy().reshape(8, 4) == 0).all(-1)
    )


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "float32"])
def test_every_kind_of_id(dtype: str) -> None:
    layer, _ = both()
    expected = layer(IDS)
    ids = tf.cast(IDS, dtype)
    np.testing.assert_array_equal(layer(ids), expected)
    np.testing.assert_allclose(
        layer(ids, training=True), tf.gather(layer.effective_weights(0)["embeddings"], IDS)
    )


def test_it_can_be_wrapped_again() -> None:
    inner = layers.DropoutEmbedding(60, 40, 0.5, seed=1, embeddings_initializer="ones")
    layer = layers.WeightDropout(inner, 0.5, seed=2)
    y = layer(tf.range(60), training=True).numpy()
    rows = (y == 0).all(-1)
    assert abs(rows.mean() - 0.5) < 5 * 0.5 / math.sqrt(60)
    rest = (y[~rows] == 0).mean()
    assert abs(rest - 0.5) < 5 * 0.5 / math.sqrt(40 * (~rows).sum())
    assert set(np.unique(y)) == {0.0, 4.0}


@pytest.mark.parametrize("rate", [1.0, -0.1, float("nan"), "x"])
def test_a_rate_out_of_range_is_an_error(rate) -> None:
    with pytest.raises(ValueError, match=r"'embeddings' of layer 'e'.*rate must be in \[0, 1\)"):
        layers.DropoutEmbedding(9, 4, rate, name="e")


def test_a_tensor_flag() -> None:
    layer, _ = both()
    function = tf.function(
        lambda t: layer(IDS, training=t), input_signature=[tf.TensorSpec([], tf.bool)]
    )
    np.testing.assert_array_equal(function(tf.constant(False)), layer(IDS))
    expected = tf.gather(layer.effective_weights(0)["embeddings"], IDS)
    np.testing.assert_allclose(function(tf.constant(True)), expected)
    assert layer.calls == 1
