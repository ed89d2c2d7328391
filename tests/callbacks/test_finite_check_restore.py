"""`FiniteCheck("restore")`: return to the end of the last epoch."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from finite_check_fits import fit, make, tf_variable
from planted_nan_models import data, state
from replicas import two_replicas
from stack_marks import IS_KERAS_2, extended, needs_keras3
from tables_by_make_target import with_slow_rest

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError
from tfwd.optimizers import NonMonotonicASGD, NonMonotonicASGDCallback


class Breaks(keras.callbacks.Callback):
    """A callback that makes a weight NaN after a batch, and records the state one batch later."""

    def __init__(self, epoch=1, batch=1):
        super().__init__()
        self.place, self.broken, self.seen = (epoch, batch), False, None

    def on_train_batch_end(self, batch, logs=None):
        if (len(self.model.history.epoch), batch) == self.place and not self.broken:
            self.broken = True
            kernel = self.model.get_layer("last").kernel
            kernel.assign(kernel * np.nan)
        elif self.broken and self.seen is None:
            self.seen = state(self.model)


def held(model):
    """Returns the weights, the random states and the optimizer's variables, without metrics."""
    variables = model.optimizer.variables
    return [*model.variables, *(variables() if callable(variables) else variables)]


def scaled(optimizer):
    library = keras.mixed_precision if IS_KERAS_2 else keras.optimizers
    return library.LossScaleOptimizer(optimizer, initial_scale=4.0)


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "scaled": lambda: scaled(keras.optimizers.Adam(0.1)),
}


def rate_of(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer).learning_rate


def plain_training(optimizer, x, y, returns=1):
    """Trains with Keras alone, with all state set by hand to the state after the first epoch.

    Returns:
        The state of the model after the first epoch, and the state at the end.
    """
    model = make(optimizer=OPTIMIZERS[optimizer]())
    fit(model, x, y)
    kept = [variable.numpy() for variable in held(model)]
    fit(model, x[:16], y[:16])  # the steps before the one that is bad
    for variable, value in zip(held(model), kept, strict=True):
        variable.assign(value)
    rate_of(model.optimizer).assign(0.1 * 0.5**returns)
    fit(model, x[24:], y[24:])
    return kept, [variable.numpy() for variable in held(model)]


def close(ours, theirs):
    """Asserts that values are equal except for last bits: the two steps are different graphs."""
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", with_slow_rest(OPTIMIZERS, {"momentum"}))
def test_restore_goes_back_to_the_last_epoch(optimizer):
    x, y = data(4)
    after, end = plain_training(optimizer, x, y)
    breaks = Breaks()
    model = make(optimizer=OPTIMIZERS[optimizer]())
    check = FiniteCheck("restore", factor=0.5)
    with pytest.warns(UserWarning, match="learning rate 0.05"):
        fit(model, x, y, check, breaks, epochs=2)
    rate = rate_of(model.optimizer)
    assert float(rate.numpy()) == pytest.approx(0.05)
    rates = [i for i, variable in enumerate(held(model)) if variable is rate]
    seen = breaks.seen[: len(held(model))]
    close(*([v for i, v in enumerate(all_of) if i not in rates] for all_of in (seen, after)))
    close([variable.numpy() for variable in held(model)], end)
    assert check.reports[0].causes[0].name == "weights that are not finite already"
    assert "'last/kernel'" in check.reports[0].causes[0].evidence or not IS_KERAS_2


def test_restore_keeps_no_epoch_that_is_not_finite():
    """Checks that no epoch with non-finite values is stored.

    Steps that are not checked can leave such values at the end of an epoch.
    """
    x, y = data(4)
    model = make(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    breaks = Breaks(1, 3)
    with pytest.warns(UserWarning, match="restored the end of the last epoch"):
        fit(model, x, y, FiniteCheck("restore"), breaks, epochs=3)
    assert all(np.isfinite(value).all() for value in [v.numpy() for v in held(model)])


@extended
def test_restore_without_a_good_epoch():
    x, y = data(4)
    x[5, 0] = np.nan
    with pytest.raises(NonFiniteError, match="No epoch of this run has ended with finite weights"):
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


@extended
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

    with pytest.warns(UserWarning, match="restored the end of the last epoch"):
        model, losses = trained(True, FiniteCheck("restore"))
    _, plain = trained(False)
    assert losses[0] == plain[0]
    # The weights do not change, so an epoch's loss is the mean over its three good batches.
    assert losses[1] == pytest.approx(model.evaluate(x[:24], 2 * y[:24], verbose=0), rel=1e-5)


def reduce_at_each_epoch():
    """Returns a callback that multiplies the rate by 0.1 at the end of each epoch but the first."""
    return keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=1e9)


def scheduled(rate):
    return lambda: keras.callbacks.LearningRateScheduler(rate)


# A callback that sets the rate, the number of bad steps, and the rate after the last of them.
RATES = {
    "reduced": (reduce_at_each_epoch, 1, 0.01 * 0.5),
    "lower": (scheduled(lambda epoch: 0.1 ** max(epoch, 1)), 1, 0.01 * 0.5),
    "higher": (scheduled(lambda epoch: 0.1 + epoch // 2), 1, 0.1 * 0.5),
    "NaN": (scheduled(lambda epoch: 0.1 if epoch < 2 else np.nan), 0, 0.1 * 0.5),
    "twice": (reduce_at_each_epoch, 2, 0.01 * 0.25),
}


@pytest.mark.parametrize("is_first", [True, False], ids=["check_first", "check_last"])
@pytest.mark.parametrize("given", with_slow_rest(RATES, {"reduced", "lower"}))
def test_restore_lowers_the_rate_of_another_callback(given, is_first):
    make_callback, bad, expected = RATES[given]
    x, y = data(4)
    model = make(optimizer=keras.optimizers.SGD(0.1))
    callbacks = [FiniteCheck("restore"), make_callback()][:: 1 if is_first else -1]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        fit(model, x, y, *callbacks, *(Breaks(2, 1 + i) for i in range(bad)), epochs=3)
    texts = [str(one.message) for one in shown if "FiniteCheck" in str(one.message)]
    assert len(texts) == max(bad, 1)
    assert f"at learning rate {expected:.4g}:" in texts[-1]


class EpochLogs(keras.callbacks.Callback):
    """A callback that records what the callbacks after `FiniteCheck` see."""

    def __init__(self):
        super().__init__()
        self.epochs, self.batches = [], []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(float(logs["loss"]))


def test_epochs_whose_steps_are_all_bad_end_the_training():
    """Checks that bad steps are counted over epochs, and that these epochs have no loss."""
    x, y = data(2)
    bad = np.full_like(x, np.nan)
    batches = [(x[:8], y[:8]), (x[8:], y[8:])] + [(bad[:8], y[:8])] * 20
    logs = EpochLogs()
    model = make(optimizer=keras.optimizers.SGD(0.1))
    callbacks = [FiniteCheck("restore", max_consecutive=5), logs]
    with (
        warnings.catch_warnings(),
        pytest.raises(NonFiniteError, match="5 bad steps led"),
    ):
        warnings.simplefilter("ignore")
        given = (batch for batch in batches)
        model.fit(given, steps_per_epoch=2, epochs=9, verbose=0, shuffle=False, callbacks=callbacks)
    first, *others = [epoch["loss"] for epoch in logs.epochs]
    assert np.isfinite(first) and len(others) == 2 and np.isnan(others).all()


@pytest.mark.parametrize("is_first", [True, False], ids=["check_first", "check_last"])
def test_a_learning_rate_in_the_logs_of_an_epoch_without_good_steps(is_first):
    x, y = data(1)
    model = make(optimizer=keras.optimizers.SGD(0.1))
    rate = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1)
    callbacks = [FiniteCheck("skip"), rate][:: 1 if is_first else -1]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        history = fit(model, x * np.nan, y, *callbacks, epochs=2).history
    assert "all 1 steps of epoch 1 were bad" in " ".join(str(one.message) for one in shown)
    rates = history["lr" if IS_KERAS_2 else "learning_rate"]
    np.testing.assert_allclose([float(rate) for rate in rates], 0.1, rtol=1e-6)
    assert np.isnan(history["loss"]).all()


def test_batch_logs_after_a_bad_first_step_are_not_of_the_last_epoch():
    """Compares with the metrics of Keras, which have no step after a reset."""
    x, y = data(2)
    batches = [(x[:8], y[:8]), (x[8:], y[8:]), (x[:8] * np.nan, y[:8]), (x[8:], y[8:])]
    logs = EpochLogs()
    model = make()
    with pytest.warns(UserWarning, match="skipped a step"):
        model.fit(
            (batch for batch in batches),
            steps_per_epoch=2,
            epochs=2,
            verbose=0,
            shuffle=False,
            callbacks=[FiniteCheck("skip"), logs],
        )
    assert logs.batches[2] == 0.0
    assert logs.batches[3] == pytest.approx(logs.epochs[1]["loss"])


def test_two_replicas_restore_the_last_epoch():
    """Checks the values of each replica. Each has its own moving means of BatchNormalization."""
    strategy = two_replicas()
    x, y = data(2)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model = make(strategy=strategy, optimizer=optimizer)
    bad = x.copy()
    bad[13, 0] = np.nan
    given = tf.data.Dataset.from_tensor_slices((np.concatenate([x, bad]), np.concatenate([y, y])))
    states = []

    class State(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            variables = map(tf_variable, model.variables)
            states.append([part.numpy() for v in variables for part in getattr(v, "values", [v])])

    options = {"steps_per_epoch": 2, "epochs": 2, "verbose": 0, "shuffle": False}
    with pytest.warns(UserWarning, match="at learning rate 0.05"):
        model.fit(given.batch(8), **options, callbacks=[FiniteCheck("restore"), State()])
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)


# An optimizer that averages weights, and the callback that exchanges them between epochs.
AVERAGES = {
    "NonMonotonicASGD": (
        lambda: NonMonotonicASGD(keras.optimizers.SGD(0.05), non_monotone_interval=1),
        lambda: NonMonotonicASGDCallback("val_loss"),
    ),
    "SwapEMAWeights": (
        lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9),
        lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    ),
}


def fit_bad_batches(make_optimizer, make_callbacks, *, bad_epochs=(), **options):
    """Fits a model. The first batch of some epochs is bad, or absent without a `FiniteCheck`.

    A restore at the beginning of an epoch only leaves out the batch.
    """
    x = np.random.default_rng(0).normal(size=(40, 5)).astype("float32")
    y = x[:, :1]
    callbacks = make_callbacks()
    is_checked = any(isinstance(callback, FiniteCheck) for callback in callbacks)
    epochs = []

    def batches():
        epochs.append(0)
        for first in range(0, 40, 8):
            is_special = len(epochs) in bad_epochs and first == 0
            if not is_special or is_checked:
                yield x[first : first + 8] * (np.nan if is_special else 1), y[first : first + 8]

    spec = (tf.TensorSpec((8, 5)), tf.TensorSpec((8, 1)))
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(1)])
    model.compile(make_optimizer(), "mse", run_eagerly=True)
    batched = tf.data.Dataset.from_generator(batches, output_signature=spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(batched, validation_data=(x, -y), verbose=0, callbacks=callbacks, **options)
    return model


@needs_keras3("fit with epochs of different lengths")
@pytest.mark.parametrize("is_first", [True, False], ids=["check_first", "check_last"])
@pytest.mark.parametrize("averages", AVERAGES)
def test_restore_of_averaged_weights(averages, is_first):
    make_optimizer, make_callback = AVERAGES[averages]

    def checked():
        check = FiniteCheck("restore", factor=1.0)
        return [check, make_callback()][:: 1 if is_first else -1]

    for bad in (9,), (2, 9, 10):
        options = {"bad_epochs": bad, "epochs": 12}
        ours = fit_bad_batches(make_optimizer, checked, **options)
        plain = fit_bad_batches(make_optimizer, lambda: [make_callback()], **options)
        for one, other in zip(state(ours), state(plain), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)


@needs_keras3("fit with epochs of different lengths")
def test_restore_before_an_optimizer_has_a_best_loss():
    """Checks that an optimizer may have infinite variables, such as the best loss so far."""
    optimizer = NonMonotonicASGD(keras.optimizers.SGD(0.05), non_monotone_interval=5)

    def checked():
        return [FiniteCheck("restore"), NonMonotonicASGDCallback("val_loss")]

    model = fit_bad_batches(lambda: optimizer, checked, bad_epochs=[2], epochs=2)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.025)


def test_restore_keeps_what_a_callback_sets_for_an_epoch():
    """Checks that a variable that a callback sets at the beginning of an epoch is not reset."""

    class Penalty(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.get_layer("last").bias.assign([10.0 * epoch])

    x, y = data(4)
    model = make(optimizer=keras.optimizers.SGD(0.0))
    with pytest.warns(UserWarning, match="restored the end of the last epoch"):
        fit(model, x, y, FiniteCheck("restore"), Penalty(), Breaks(1, 1), epochs=2)
    np.testing.assert_array_equal(model.get_layer("last").bias.numpy(), [10.0])


def test_the_report_says_what_was_restored():
    x, y = data(4)
    check = FiniteCheck("restore")
    with pytest.warns(UserWarning, match="learning rate 0.05"):
        fit(make(optimizer=keras.optimizers.SGD(0.1)), x, y, check, Breaks(), epochs=2)
    expected = "Restored the end of the last epoch with finite weights, at learning rate 0.05."
    assert check.reports[0].note == expected and expected in str(check.reports[0])
