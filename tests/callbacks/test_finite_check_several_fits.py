"""`FiniteCheck` in several fits of one model, one after the other."""

import copy

import keras
import numpy as np
import pytest
from finite_check_fits import BAD, fit, make, same
from planted_nan_models import data, state
from stack_marks import once

import tfwd
from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError


@pytest.mark.slow
def test_the_model_has_its_own_step_again():
    x, y = batches(3)
    model = make()
    fit(model, x, y)
    own = model.train_function
    fit(model, x, y, FiniteCheck())
    assert model.train_function is own
    x[3] = np.nan
    with pytest.raises(NonFiniteError):
        fit(model, x, y, FiniteCheck())
    assert model.train_function is own


class Interrupts(keras.callbacks.Callback):
    """Stops `fit` after its second step."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise self.error


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_another_check_after_an_interrupted_fit_checks_all_due_steps(error, measured):
    """The callbacks of the interrupted fit could not restore the model's training function."""
    x, y = data(5)
    model = make()
    around = [tfwd.callbacks.GradientSquaredMean()] * measured
    with pytest.raises(error):
        fit(model, x, y, FiniteCheck(), *around, Interrupts(error))
    x[8 * BAD + 8] = np.nan
    with pytest.raises(NonFiniteError) as caught:
        fit(model, x, y, FiniteCheck(every_n_steps=3))
    assert caught.value.report.step == BAD + 2
    assert all(np.all(np.isfinite(v)) for v in model.get_weights())


@once
def test_the_first_step_of_a_second_fit_is_checked():
    x, y = data(2)
    model, check = make(), FiniteCheck(every_n_steps=4)
    fit(model, x[:8], y[:8], check)
    fit(model, x[:8], y[:8], check)
    x[12] = np.nan  # an unchecked step of the third fit
    with pytest.raises(NonFiniteError) as caught:
        fit(model, x, y, check, epochs=2)
    report = caught.value.report
    assert report.step == 5
    assert "an unchecked step" in report.causes[0].evidence
    assert "The weights before the step are lost" in report.note


class Fits(keras.callbacks.Callback):
    """Trains the same model in a `fit` of its own, at the end of an epoch or of a batch."""

    def __init__(self, when, *callbacks):
        super().__init__()
        self.when, self.callbacks, self.is_inside = when, callbacks, False

    def _fit(self):
        if not self.is_inside:
            self.is_inside = True
            fit(self.model, *batches(7), *self.callbacks, batch_size=4)
            self.is_inside = False

    def on_epoch_end(self, epoch, logs=None):
        if self.when == "epoch" and epoch == 0:
            self._fit()

    def on_train_batch_end(self, batch, logs=None):
        if self.when == "batch" and batch == 1:
            self._fit()


def batches(seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(16, size)).astype("float32") for size in (6, 1)]


@pytest.mark.filterwarnings("ignore:FiniteCheck. skipped a step")
@pytest.mark.parametrize("inner", [True, False], ids=["with a check", "without"])
@pytest.mark.parametrize("when", ["epoch", "batch"])
def test_a_fit_in_a_callback_of_a_fit(when, inner):
    """Checks that the outer check goes on: its report, and the weights without the bad batch."""
    x, y = batches(3)
    bad = x.copy()
    bad[12] = np.nan  # in the last batch of 4 examples
    checks = [FiniteCheck("skip")] if inner else []
    model, check = make(), FiniteCheck("skip")
    fit(model, bad, y, check, Fits(when, *checks), batch_size=4, epochs=2)
    assert [report.place for report in check.reports] == ["epoch 1, batch 4", "epoch 2, batch 4"]
    plain = make()
    fit(plain, x[:12], y[:12], Fits(when), batch_size=4, epochs=2)
    same(state(model), state(plain))


class Counting(FiniteCheck):
    """A subclass with an attribute."""

    def __init__(self, numbers, *args, **options):
        super().__init__(*args, **options)
        self.numbers = numbers


def test_a_copy_of_a_used_check_is_new():
    """KerasTuner copies the callbacks for each trial."""
    x, y = data(3)
    x[8] = np.nan
    check = Counting([1, 2], "skip", history=3)
    with pytest.warns(UserWarning, match="skipped a step"):
        fit(make(), x, y, check)
    copied = copy.deepcopy(check)
    assert type(copied) is Counting and copied.numbers == [1, 2]
    assert copied.numbers is not check.numbers
    assert (copied.action, copied.history) == ("skip", 3)
    assert check.skipped and not (copied.skipped or copied.reports)
    with pytest.warns(UserWarning, match="skipped a step"):
        fit(make(), x, y, copied)
    assert copied.skipped == check.skipped


@pytest.mark.parametrize("last", ["raise", "skip"])
def test_the_last_of_two_checks_acts(last):
    x, y = data(3)
    x[8] = np.nan
    checks = [FiniteCheck("skip" if last == "raise" else "raise"), FiniteCheck(last)]
    if last == "raise":
        with pytest.raises(NonFiniteError):
            fit(make(), x, y, *checks)
        return
    with pytest.warns(UserWarning, match="skipped a step"):
        fit(make(), x, y, *checks)
    assert [check.skipped for check in checks] == [0, 1]


@pytest.mark.parametrize("options", [{}, {"every_n_steps": 2}])
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_data_of_another_structure_in_the_second_fit(mode, options):
    """A list and a dict with equal shapes, whose tensors are in another order."""
    rng = np.random.default_rng(0)
    width, area = rng.normal(size=(2, 16, 3)).astype("float32")
    y = width.sum(1, keepdims=True)
    results = []
    for check in (None, FiniteCheck(**options)):
        keras.utils.set_random_seed(1)
        inputs = [keras.Input((3,), name="width"), keras.Input((3,), name="area")]
        parts = [keras.layers.Dense(1)(one) for one in inputs]
        model = keras.Model(inputs, keras.layers.Add()(parts))
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=mode == "xla")
        for x in ([width, area], {"width": width, "area": area}):
            callbacks = [check] if check else []
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks)
        results.append(model.get_weights())
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_weights_that_an_unchecked_step_lost_beside_a_bad_batch():
    """Skipping the checked step does not help, although its batch is bad too."""
    x, y = data(6)
    x[8], x[16] = np.nan, np.nan  # in step 2, which is not checked, and in step 3
    model = make()
    with pytest.raises(NonFiniteError, match="Skipping this step does not help"):
        fit(model, x, y, FiniteCheck("skip", every_n_steps=2))
