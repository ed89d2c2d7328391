"""`FiniteCheck` on recurrent layers, wrapped and not: it must not end the epoch early."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2

import tfwd
from tfwd.callbacks import FiniteCheck

layers = keras.layers
X = np.random.default_rng(0).normal(size=(8, 3, 4)).astype("float32")
SHOWN = np.array([[True, True, False], [True, False, False]] * 4)


def fitted(checks, **options):
    keras.utils.set_random_seed(1)
    inputs, shown = keras.Input((3, 4)), keras.Input((3,), dtype="bool")
    cells = [layers.LSTMCell(4), layers.GRUCell(4)]
    plain = layers.RNN(cells, return_sequences=True)(inputs, mask=shown)
    dropped = tfwd.layers.WeightDropout(
        layers.LSTM(4, return_sequences=True), 0.25, weights="recurrent_kernel", seed=3
    )(inputs, mask=shown)
    model = keras.Model([inputs, shown], layers.Dense(1)(layers.Add()([plain, dropped])))
    model.compile("sgd", "mse", **options)
    history = model.fit(
        [X, SHOWN], X[..., :1], batch_size=2, epochs=2, shuffle=False, verbose=0, callbacks=checks
    )
    return model, history.history["loss"]


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"run_eagerly": True}])
def test_a_recurrent_layer_beside_a_wrapped_one(options):
    check = FiniteCheck()
    model, found = fitted([check], **options)
    plain, expected = fitted([], **options)
    assert int(model.optimizer.iterations) == 8
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_step_that_raises_stop_iteration():
    class Ended(keras.Model):
        def train_step(self, data):
            raise StopIteration

    inputs = keras.Input((3, 4))
    model = Ended(inputs, layers.Dense(1)(inputs))
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(RuntimeError, match="the training step raised StopIteration"):
        model.fit(X, X[..., :1], verbose=0, callbacks=[FiniteCheck()])


@pytest.mark.skipif(not IS_KERAS_2, reason="Keras 3 has no ragged inputs")
@pytest.mark.parametrize("layer", ["LSTM", "GRU", "SimpleRNN"])
def test_a_bad_step_on_ragged_texts(layer):
    """The diagnosis cannot show the time steps of a ragged tensor."""
    ids = keras.Input((None,), ragged=True, dtype="int32")
    hidden = getattr(keras.layers, layer)(3)(keras.layers.Embedding(9, 4)(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse")
    texts = tf.ragged.constant([[1, 2], [3], [4, 5, 6], [7]] * 4, dtype=tf.int32)
    y = np.zeros((16, 1), "float32")
    y[5] = np.nan
    check = FiniteCheck("skip")
    batches = tf.data.Dataset.from_tensor_slices((texts, y)).batch(4)
    with pytest.warns(UserWarning, match="skipped a step: data 'y'"):
        model.fit(batches, verbose=0, callbacks=[check])
    assert check.skipped == 1
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
