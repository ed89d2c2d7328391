"""The callbacks of tensorflow-addons in `fit` of a model of tfwd's layers."""

import warnings

import keras
import numpy as np
import pytest
from stack_marks import needs_addons

from tfwd import layers, optimizers, parametrize
from tfwd import parametrizations as P

pytestmark = needs_addons

X = np.linspace(-1, 1, 16 * 5 * 3).reshape(16, 5, 3).astype("float32")
Y = X.sum((1, 2))[:, None]


@pytest.fixture
def tfa():
    """Returns tensorflow-addons, which warns at import that its development has ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tensorflow_addons
    return tensorflow_addons


def make(optimizer):
    """Returns a model with a dropped weight and a weight with noise."""
    model = keras.Sequential(
        [
            keras.Input((5, 3)),
            layers.WeightDropLSTM(4, weight_dropout=0.5, seed=1, name="lstm"),
            keras.layers.Dense(1, name="dense"),
        ]
    )
    model = parametrize(model, {"dense/kernel": P.GaussianNoise(0.01)}, seed=2)
    model.compile(optimizer, "mse")
    return model


def test_progress_bar(tfa, capsys):
    bar = tfa.callbacks.TQDMProgressBar()
    history = make("sgd").fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[bar])
    printed = capsys.readouterr()
    shown = printed.out + printed.err
    assert "Training" in shown and "2/2" in shown and "4/4" in shown
    assert f"loss: {history.history['loss'][-1]:.4f}" in shown


@pytest.mark.parametrize(
    ("update", "decayed"),
    [
        (False, True),
        (True, False),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", ["SWA", "MovingAverage"])
def test_averages_are_saved(tfa, kind, update, decayed, tmp_path):
    """Checks that averages are saved, with the average outside and tfwd's decay inside or not."""
    inner = keras.optimizers.legacy.SGD(0.05)
    if decayed:
        inner = optimizers.DecoupledWeightDecay(inner, 0.1)
    if kind == "SWA":
        outer = tfa.optimizers.SWA(inner, start_averaging=0, average_period=2)
    else:
        outer = tfa.optimizers.MovingAverage(inner, average_decay=0.5)
    model = make(outer)
    path = str(tmp_path / "weights.h5")
    saved = tfa.callbacks.AverageModelCheckpoint(
        filepath=path, update_weights=update, save_weights_only=True
    )
    raw = []
    seen = keras.callbacks.LambdaCallback(
        on_batch_end=lambda batch, logs: raw.append([v.numpy() for v in model.trainable_weights])
    )
    history = model.fit(X, Y, batch_size=4, epochs=1, verbose=0, callbacks=[seen, saved])
    assert np.isfinite(history.history["loss"][0]) and len(raw) == 4
    averages = [outer.get_slot(v, "average").numpy() for v in model.trainable_weights]
    assert not any(np.allclose(a, r) for a, r in zip(averages, raw[-1], strict=True))
    left = averages if update else raw[-1]
    for variable, value in zip(model.trainable_weights, left, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    other = make("sgd")
    other.load_weights(path)
    for variable, value in zip(other.trainable_weights, averages, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_a_decay_around_an_average_is_no_average_for_the_callback(tfa, tmp_path):
    average = tfa.optimizers.MovingAverage(keras.optimizers.legacy.SGD(0.05))
    model = make(optimizers.DecoupledWeightDecay(average, 0.1))
    saved = tfa.callbacks.AverageModelCheckpoint(
        filepath=str(tmp_path / "weights.h5"), update_weights=True, save_weights_only=True
    )
    with pytest.raises(TypeError, match="AverageModelCheckpoint is only used"):
        model.fit(X, Y, verbose=0, callbacks=[saved])
