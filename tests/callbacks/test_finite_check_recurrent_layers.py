"""`FiniteCheck` on recurrent layers, wrapped and not: it must not end the epoch early."""

import keras
import numpy as np
import pytest

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
