"""`FiniteCheck` in eager mode with optimizers that count in Python, as Keras 2's Nadam does.

The oracle is Keras's training without the undone steps.
"""

import keras
import numpy as np
import pytest

from tfwd.callbacks import FiniteCheck

RNG = np.random.default_rng(3)
X = RNG.normal(size=(24, 4)).astype("float32")
Y = RNG.normal(size=(24, 2)).astype("float32")


def made():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Nadam(0.01), "mse", run_eagerly=True)
    return model


def fit(model, y, rows=slice(None), check=None, epochs=1):
    callbacks = [] if check is None else [check]
    settings = {"batch_size": 4, "shuffle": False, "verbose": 0, "epochs": epochs}
    model.fit(X[rows], y[rows], callbacks=callbacks, **settings)


def test_a_skipped_step_of_nadam():
    bad, good = made(), made()
    broken = Y.copy()
    broken[9] = np.nan
    with pytest.warns(UserWarning, match="skipped a step"):
        fit(bad, broken, check=FiniteCheck("skip"))
    fit(good, Y, np.r_[0:8, 12:24])
    for one, other in zip(bad.get_weights(), good.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


class Breaks(keras.callbacks.Callback):
    """Makes the labels of the third batch of the second epoch NaN."""

    def __init__(self, labels):
        super().__init__()
        self.labels, self.epoch = labels, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def batches(self):
        for i in range(6):
            y = self.labels[4 * i : 4 * i + 4]
            yield X[4 * i : 4 * i + 4], y * np.float32(np.nan if self.epoch == 1 and i == 2 else 1)


def test_a_restored_epoch_of_nadam():
    bad, good = made(), made()
    breaks = Breaks(Y)

    def endless():
        while True:
            yield from breaks.batches()

    with pytest.warns(UserWarning, match="restored"):
        bad.fit(
            endless(),
            steps_per_epoch=6,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[breaks, FiniteCheck("restore")],
        )
    fit(good, Y)
    good.optimizer.learning_rate = 0.005
    fit(good, Y, slice(12, 24))
    for one, other in zip(bad.get_weights(), good.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
