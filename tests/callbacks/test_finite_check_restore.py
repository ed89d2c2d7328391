"""`FiniteCheck("restore")`: it goes back to the end of the last epoch."""

import keras
import numpy as np
import pytest
from finite_fits import fit, make
from planting import data, state
from stacks import IS_KERAS_2

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError


@pytest.mark.slow
def test_restore_goes_back_to_the_last_epoch():
    x, y = data(4)
    good = make(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    fit(good, x, y)
    after = state(good)

    class Breaks(keras.callbacks.Callback):
        """Makes a weight NaN in the second epoch, and looks at what the check makes of it."""

        def on_train_batch_end(self, batch, logs=None):
            self.batches.append((len(self.model.history.epoch), batch))
            if self.batches[-1] == (1, 1) and not self.broken:
                self.broken = True
                kernel = self.model.get_layer("last").kernel
                kernel.assign(kernel * np.nan)
            elif self.broken and self.seen is None:
                self.seen = state(self.model)

    breaks = Breaks()
    breaks.batches, breaks.broken, breaks.seen = [], False, None
    model = make(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    check = FiniteCheck("restore", factor=0.5)
    with pytest.warns(UserWarning, match="learning rate 0.05"):
        fit(model, x, y, check, breaks, epochs=2)
    rate = float(model.optimizer.learning_rate.numpy())
    assert rate == pytest.approx(0.05)
    weights = len(model.variables)
    for ours, theirs in zip(breaks.seen[:weights], after[:weights], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert check.reports[0].causes[0].name == "weights that are not finite already"
    assert "'last/kernel'" in check.reports[0].causes[0].evidence or not IS_KERAS_2


def test_restore_without_a_good_epoch():
    x, y = data(4)
    x[5, 0] = np.nan
    with pytest.raises(NonFiniteError, match="no finished epoch yet to go back to"):
        fit(make(), x, y, FiniteCheck("restore"))


def test_restore_needs_a_rate_that_can_be_lowered():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    model = make(optimizer=keras.optimizers.SGD(schedule))
    x, y = data(2)
    before = model.get_weights()
    with pytest.raises(ValueError, match="is a schedule: give the optimizer a number"):
        fit(model, x, y, FiniteCheck("restore"))
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_metrics_of_an_epoch_that_went_back_are_of_its_good_steps():
    x, y = data(4)

    def batches(bad):
        for epoch in range(2):
            for i in range(4):
                given = x[8 * i : 8 * i + 8].copy()
                if bad and (epoch, i) == (1, 3):
                    given[0] = np.nan
                yield given, y[8 * i : 8 * i + 8] * (1 + epoch)

    def trained(bad, *callbacks):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
        history = model.fit(
            batches(bad),
            steps_per_epoch=4,
            epochs=2,
            verbose=0,
            shuffle=False,
            callbacks=list(callbacks),
        )
        return model, history.history["loss"]

    with pytest.warns(UserWarning, match="back to the end of the last epoch"):
        model, losses = trained(True, FiniteCheck("restore"))
    _, plain = trained(False)
    assert losses[0] == plain[0]
    # The weights stay as they are, so an epoch's loss is the mean over its three good batches.
    assert losses[1] == pytest.approx(model.evaluate(x[:24], 2 * y[:24], verbose=0), rel=1e-5)
