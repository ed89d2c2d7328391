"""Averaging in `fit`: its callback, its effect on other callbacks, and its messages."""

import re
import warnings

import keras
import numpy as np
import pytest
from keras_optimizers_table import make
from optimizer_tools import LossScale, X, Y, assert_same, fit, model, trigger, triggered_at, values
from stack_marks import extended, quick_rows

from tfwd.optimizers import DecoupledWeightDecay, NonMonotonicASGD, NonMonotonicASGDCallback


class Seen(keras.callbacks.Callback):
    """A callback that records the weights at the end of each epoch and after each step."""

    def __init__(self):
        super().__init__()
        self.at_epochs, self.steps = [], []

    def on_epoch_end(self, epoch, logs=None):
        self.at_epochs.append(self.model.get_weights())

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(self.model.get_weights())


def test_the_callback_in_fit():
    """Checks rising validation loss: a trigger after epoch 3, then averages for all observers."""
    net, seen = model(), Seen()
    net.compile(NonMonotonicASGD(make("SGD"), 1), "mse", jit_compile=False)
    history = fit(
        net,
        epochs=5,
        validation_data=(X, -Y),
        callbacks=[NonMonotonicASGDCallback(), seen],
    ).history["val_loss"]
    epoch = triggered_at(history, 1)
    assert epoch is not None and 3 * (epoch + 1) < len(seen.steps)
    for end in range(5):
        since = seen.steps[3 * (epoch + 1) : 3 * (end + 1)] or [seen.steps[3 * end + 2]]
        for i, found in enumerate(seen.at_epochs[end]):
            mean = np.mean([step[i] for step in since], axis=0, dtype="float64")
            np.testing.assert_allclose(found, mean, atol=1e-6)
    assert_same(net.get_weights(), seen.at_epochs[-1])
    assert net.optimizer.exchanged
    assert net.evaluate(X, -Y, verbose=0) == pytest.approx(history[-1], rel=1e-5)


@extended
def test_the_callback_needs_the_optimizer_and_a_loss():
    net = model()
    net.compile("sgd", "mse")
    with pytest.raises(ValueError, match="one NonMonotonicASGD, but its optimizer SGD contains 0"):
        fit(net, callbacks=[NonMonotonicASGDCallback()])
    net.compile(LossScale(NonMonotonicASGD(make("SGD"))), "mse")
    with pytest.warns(UserWarning, match="no 'val_loss', only loss"):
        fit(net, epochs=2, callbacks=[NonMonotonicASGDCallback()])


@extended
def test_a_moving_average_of_keras_s_gives_way_once_this_one_is_in_the_model():
    """Checks that Keras's average is written into the model in `fit` only until the trigger."""
    average = {"use_ema": True, "ema_momentum": 0.5}
    weights = []
    for options in ({}, average):
        net = model()
        net.compile(NonMonotonicASGD(make("SGD", 0.01, **options), 1), "mse")
        net.optimizer.build(net.trainable_variables)
        trigger(net.optimizer)
        fit(net, epochs=2, validation_data=(X, Y), callbacks=[NonMonotonicASGDCallback()])
        assert net.optimizer.exchanged
        weights.append(net.get_weights())
        net.optimizer.exchange()
        weights.append(net.get_weights())
    assert_same(weights[2], weights[0])
    assert_same(weights[3], weights[1])  # the raw ones
    net = model()
    net.compile(NonMonotonicASGD(make("SGD", 0.01, **average), 9), "mse")
    fit(net, validation_data=(X, Y), callbacks=[NonMonotonicASGDCallback()])
    slots = net.optimizer._model_variables_moving_average
    assert_same(net.get_weights(), values(slots))


SILENT = "has not observed any validation loss, so it averages nothing and acts as SGD"


@quick_rows("<lambda>0")
@pytest.mark.parametrize("around", [lambda o: o, LossScale, lambda o: DecoupledWeightDecay(o, 0.1)])
def test_a_fit_without_the_callback_says_once_that_nothing_is_averaged(around):
    net = model()
    net.compile(around(NonMonotonicASGD(make("SGD"), name="average")), "mse")
    with pytest.warns(UserWarning, match="'average' " + SILENT) as caught:
        fit(net, validation_data=(X, Y))
    messages = [str(one.message) for one in caught]
    assert any("callbacks=[NonMonotonicASGDCallback()]" in message for message in messages)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(net)


@extended
def test_it_says_nothing_where_the_callback_or_the_user_tells_it_losses():
    net = model()
    net.compile(NonMonotonicASGD(make("SGD")), "mse")
    net.optimizer.build(net.trainable_variables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(net, validation_data=(X, Y), callbacks=[NonMonotonicASGDCallback()])
        fit(net)
    net = model()
    net.compile(NonMonotonicASGD(make("SGD")), "mse")
    with pytest.warns(UserWarning, match="the logs of the epoch have no 'val_loss'") as caught:
        fit(net, callbacks=[NonMonotonicASGDCallback()])
    assert not any(re.search(SILENT, str(warning.message)) for warning in caught)
    with pytest.warns(UserWarning, match=SILENT):  # the callback was of the other fit
        fit(net)


class Watching(keras.callbacks.Callback):
    """A callback that records the state that a saved optimizer would have at an epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluations: list[int] = []

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.evaluations.append(int(self.model.optimizer._evaluations.numpy()))


@extended
@pytest.mark.parametrize("first", [False, True])
def test_callbacks_before_it_find_the_epochs_loss_observed(first: bool) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(NonMonotonicASGD("sgd", 1), "mse")
    x, y = np.zeros((4, 2)), np.ones((4, 1))
    watching, own = Watching(), NonMonotonicASGDCallback()
    callbacks = [watching, own] if first else [own, watching]
    model.fit(x, y, validation_data=(x, -y), epochs=3, verbose=0, callbacks=callbacks)
    assert watching.evaluations == [1, 2, 3]
