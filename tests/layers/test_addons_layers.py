"""Weight dropout inside and around tensorflow-addons' WeightNormalization, which sets a kernel."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfwd import layers

tfa = pytest.importorskip("tensorflow_addons", reason="tensorflow-addons is on the other stack")

X = tf.random.stateless_normal([4, 5], [1, 2])
TWICE = "cannot be run a second time in backward"


def pair() -> tuple[keras.layers.Layer, keras.layers.Layer]:
    """Returns a normalized layer with a set gain, and weight dropout around it."""
    normalized = tfa.layers.WeightNormalization(keras.layers.Dense(3), data_init=False)
    normalized(X)
    normalized.v.assign(tf.random.stateless_normal([5, 3], [3, 4]))
    normalized.g.assign([1.0, 2.0, 3.0])
    return normalized, layers.WeightDropout(normalized, 0.5, seed=1)


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("traced", [False, True])
def test_dropout_comes_before_the_norm_and_leaves_the_gain_alone(traced: bool) -> None:
    normalized, wrapped = pair()
    call = tf.function(wrapped) if traced else wrapped
    with pytest.warns(UserWarning, match=TWICE), tf.GradientTape() as tape:
        outputs = call(X, training=True)
        loss = tf.reduce_sum(tf.sin(outputs))
    found = tape.gradient(loss, [normalized.v, normalized.g])
    (dropped,) = wrapped.effective_weights(0).values()
    kept = tf.cast(dropped != 0.0, tf.float32)
    assert 0 < int(tf.reduce_sum(kept)) < 15
    with tf.GradientTape() as tape:
        kernel = tf.nn.l2_normalize(normalized.v * kept * 2.0, axis=0) * normalized.g
        expected = tf.matmul(X, kernel)
        loss = tf.reduce_sum(tf.sin(expected))
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(found, tape.gradient(loss, [normalized.v, normalized.g]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_evaluation_is_the_normalized_layer() -> None:
    normalized, wrapped = pair()
    np.testing.assert_array_equal(wrapped(X), normalized(X))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("traced", [False, True])
def test_dropout_inside_comes_after_the_norm(traced: bool, recompute: bool) -> None:
    inside = layers.WeightDropout(keras.layers.Dense(3), 0.5, seed=1, recompute=recompute)
    normalized = tfa.layers.WeightNormalization(inside, data_init=False)
    normalized(X)
    normalized.v.assign(tf.random.stateless_normal([5, 3], [3, 4]))
    normalized.g.assign([1.0, 2.0, 3.0])
    inside.layer.bias.assign([0.1, 0.2, 0.3])
    raw = [normalized.v, normalized.g, inside.layer.bias]

    def plain(kept: tf.Tensor | float) -> tf.Tensor:
        kernel = tf.nn.l2_normalize(normalized.v, axis=0) * normalized.g
        return tf.matmul(X, kernel * kept) + inside.layer.bias

    np.testing.assert_allclose(normalized(X), plain(1.0), rtol=1e-5, atol=1e-6)
    call = tf.function(normalized) if traced else normalized
    for number in range(2):
        kept = tf.cast(inside.effective_weights(number)["kernel"] != 0.0, tf.float32) * 2.0
        with tf.GradientTape() as tape:
            outputs = call(X, training=True)
            loss = tf.reduce_sum(tf.sin(outputs))
        found = tape.gradient(loss, raw)
        with tf.GradientTape() as tape:
            expected = plain(kept)
            loss = tf.reduce_sum(tf.sin(expected))
        np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
        for a, b in zip(found, tape.gradient(loss, raw), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert inside.calls == 2
