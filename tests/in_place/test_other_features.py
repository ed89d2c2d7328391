"""Features of tfwd on a model with parametrizations in place."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from in_place_tools import DENSE, EXAMPLES, LABELS, Autoencoder, added, made, variables

import tfwd
from tfwd import parametrizations as P


def test_moments_use_one_draw_for_all_chunks() -> None:
    """Compares with one plain gradient per example, with the masks' factors."""

    def make() -> keras.Model:
        return keras.Sequential([keras.Input((8,)), DENSE(4, activation="tanh"), DENSE(1)])

    model, plain = made(make), made(make)
    tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    values = [v.numpy() for v in added(model).effective_weights(0).values()]
    found = tfwd.gradients.moments(
        model, EXAMPLES, LABELS, keras.losses.MeanSquaredError(), training=True, chunk_size=4
    )
    assert added(model).calls == 1
    raw = model.get_weights()
    plain.set_weights([values[0], raw[1], values[1], raw[3]])
    factors = [2.0 * (values[0] != 0), 1.0, 2.0 * (values[1] != 0), 1.0]
    expected = [np.zeros_like(w) for w in raw]
    for i in range(16):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((plain(EXAMPLES[i : i + 1]) - LABELS[i : i + 1]) ** 2)
        for total, gradient, factor in zip(
            expected, tape.gradient(loss, variables(plain)), factors, strict=True
        ):
            total += (gradient.numpy() * factor) ** 2 / 16
    for got, one in zip(found.mean_square, expected, strict=True):
        np.testing.assert_allclose(got, one, rtol=1e-4, atol=1e-6)


def test_finite_check_names_the_layer_inside() -> None:
    model = made(Autoencoder)
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    model.compile("sgd")
    bad = model.parts["in"].layers[-1]
    bad.set_weights([np.full_like(w, np.inf) for w in bad.get_weights()])
    with pytest.raises(Exception, match=bad.name):
        model.fit(EXAMPLES, verbose=0, callbacks=[tfwd.callbacks.FiniteCheck()])


def test_masks_for_each_example() -> None:
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(6), DENSE(3)]))
    parts = {"kernel": P.Dropout(0.5, per_example=True)}
    tfwd.parametrize(model, parts, seed=1, in_place=True)
    first, second = (np.asarray(v) for v in added(model).effective_weights(0, 16).values())
    raw = model.get_weights()
    expected = [
        (x @ a + raw[1]) @ b + raw[3] for x, a, b in zip(EXAMPLES, first, second, strict=True)
    ]
    np.testing.assert_allclose(model(EXAMPLES, training=True), expected, rtol=1e-4, atol=1e-5)


def test_masks_for_each_example_inside_attention() -> None:
    model, x = keras.layers.MultiHeadAttention(2, 4), tf.constant(EXAMPLES.reshape(2, 8, 8))
    keras.utils.set_random_seed(2)
    model(x, x)
    parts = {"value/kernel": P.Dropout(0.5, per_example=True), ".*kernel": P.Dropout(0.3)}
    tfwd.parametrize(model, parts, seed=1, in_place=True)
    model(x, x, training=True)
    assert added(model).calls == 1


def test_samples_of_masks_for_each_example() -> None:
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(6)]))
    parts = {"kernel": P.Dropout(0.5, per_example=True)}
    tfwd.parametrize(model, parts, seed=1, in_place=True)
    found = tfwd.predict_samples(model, EXAMPLES, 2, verbose=0, return_samples=True)
    for call in range(2):
        (kernels,) = added(model).effective_weights(call, 16).values()
        expected = np.einsum("bi,bio->bo", EXAMPLES, kernels) + model.get_weights()[1]
        np.testing.assert_allclose(found.samples[call], expected, rtol=1e-4, atol=1e-5)


def test_samples() -> None:
    model, plain = made(Autoencoder), made(Autoencoder)
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    found = tfwd.predict_samples(model, EXAMPLES, 3, batch_size=6, verbose=0, return_samples=True)
    one = added(model)
    assert one.calls == 0
    for call in range(3):
        values = one.effective_weights(call).values()
        effective = {id(t.variable): v for (t, _), v in zip(one.targeted, values, strict=True)}
        plain.set_weights([np.asarray(effective.get(id(v), v)) for v in model.weights])
        np.testing.assert_allclose(found.samples[call], plain(EXAMPLES), rtol=1e-4, atol=1e-5)


def test_mixout_in_place_mixes_with_the_first_weights() -> None:
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(3)]))
    start = model.get_weights()
    tfwd.parametrize(model, {"kernel": P.Mixout(0.5)}, seed=1, in_place=True)
    model(EXAMPLES, training=True)
    with pytest.warns(UserWarning, match="has new weights, but its Mixout"):
        model.set_weights([start[0] + 1, start[1]])
    (weight,) = added(model).effective_weights(1).values()
    kept = np.isclose(weight, start[0], atol=1e-6)
    assert 0 < kept.sum() < kept.size
    # The others are moved so that the mean over draws is the present weight.
    np.testing.assert_allclose(weight[~kept], (start[0] + 2)[~kept], rtol=1e-5)
    tfwd.reset_references(model)
    (weight,) = added(model).effective_weights(1).values()
    np.testing.assert_allclose(weight, start[0] + 1, rtol=1e-6)


def test_weight_norm_is_folded_in_place() -> None:
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(3)]))
    tfwd.parametrize(model, {"kernel": P.WeightNorm()}, in_place=True)
    expected, kernel = model(EXAMPLES), model.layers[0].kernel
    with pytest.raises(ValueError, match="in evaluation"):
        tfwd.unwrap(model)
    assert tfwd.unwrap(model, fold=True) is model
    assert model.layers[0].kernel is kernel
    np.testing.assert_allclose(model(EXAMPLES), expected, rtol=1e-6)
