"""A bad first step of a training, before Keras has built the compiled metrics."""

import keras
import numpy as np
import pytest

from tfwd.callbacks import FiniteCheck

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 6)).astype("float32")
CLASSES = RNG.integers(0, 3, 12).astype("float32")


def trained(x, y, callbacks=(), eager=False):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], run_eagerly=eager)
    history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[*callbacks])
    return model, history.history


@pytest.mark.filterwarnings("ignore:FiniteCheck")
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("bad", [0, 1], ids=["first", "second"])
def test_skipping_equals_a_fit_without_the_batch(bad, eager):
    """Checks weights and history. The labels of one batch have a NaN."""
    x, y = np.insert(X, [4 * bad] * 4, 1.0, axis=0), np.insert(CLASSES, [4 * bad] * 4, np.nan)
    check = FiniteCheck("skip")
    model, history = trained(x, y, [check], eager)
    expected, expected_history = trained(X, CLASSES, eager=eager)
    assert check.skipped == 1
    for one, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    assert set(history) == set(expected_history)
    for name, values in expected_history.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:FiniteCheck")
def test_an_epoch_of_bad_steps_has_no_results():
    _, history = trained(X, np.full(12, np.nan, "float32"), [FiniteCheck("skip")])
    assert all(np.isnan(values).all() for values in history.values())
