"""`FiniteCheck` at a bad step: the state that stays, and each action."""

import keras
import numpy as np
import pytest
from finite_check_fits import BAD, MODES, fit, make, same
from planted_nan_models import data, state
from replicas import two_replicas
from stack_marks import IS_KERAS_2, extended, once
from tables_by_make_target import with_slow_rest

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError


@pytest.mark.parametrize(
    "case",
    with_slow_rest(["graph, labels", "xla, labels", "eager, data"], {"graph, labels"}),
)
def test_all_is_as_it_was_before_the_step(case):
    mode, place = case.split(", ")
    x, y = data(4)
    good = make(mode=mode)
    keras.utils.set_random_seed(4)
    fit(good, x[: 8 * BAD], y[: 8 * BAD])
    bad = make(mode=mode)
    (x if place == "data" else y)[8 * BAD + 5, 0] = np.nan
    keras.utils.set_random_seed(4)
    with pytest.raises(NonFiniteError):
        fit(bad, x, y, FiniteCheck())
    same(state(bad), state(good), mode)


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"four steps an execution"}))
def test_skip_is_training_without_the_batch(mode):
    x, y = data(5)
    good = make(mode=mode)
    rows = np.r_[0 : 8 * BAD, 8 * (BAD + 1) : 40]
    keras.utils.set_random_seed(4)
    fit(good, x[rows], y[rows])
    bad = make(mode=mode)
    x[8 * BAD + 5, 0] = np.inf
    check = FiniteCheck("skip")
    keras.utils.set_random_seed(4)
    with pytest.warns(UserWarning, match="skipped a step: data 'x'"):
        fit(bad, x, y, check)
    assert check.skipped == 1
    same(state(bad), state(good), mode)


@once
def test_skip_gives_up():
    x, y = data(6)
    x[8:, 0] = np.nan
    with pytest.warns(UserWarning), pytest.raises(NonFiniteError) as caught:
        fit(make(), x, y, FiniteCheck("skip", max_consecutive=2))
    assert caught.value.report.note == (
        "Before this step, 2 consecutive bad steps were skipped. In each of these steps, NaN or "
        "infinity began in data x: check whether all batches are bad, and repair the data. The "
        "weights have their values from before the step."
    )


def test_an_epoch_whose_steps_are_all_left_out_has_no_loss():
    x, y = data(4)
    x[:16, 0] = np.nan
    with pytest.warns(UserWarning, match="skipped") as warned:
        history = fit(make(), x[:8], y[:8], FiniteCheck("skip"), epochs=2).history
    said = [str(one.message) for one in warned if "steps of epoch" in str(one.message)]
    assert len(said) == 2
    assert all(np.isnan(value) for values in history.values() for value in values)
    with pytest.warns(UserWarning, match="skipped"):
        history = fit(make(), x[8:24], y[8:24], FiniteCheck("skip")).history
    assert np.isfinite(history["loss"]).all()


def test_two_replicas_leave_a_step_out_together():
    strategy = two_replicas()
    x, y = data(5)
    rows = np.r_[0 : 8 * BAD, 8 * (BAD + 1) : 40]
    good = make(strategy=strategy)
    keras.utils.set_random_seed(4)
    fit(good, x[rows], y[rows])
    x[8 * BAD + 6, 0] = np.nan  # on the second replica
    bad = make(strategy=strategy)
    check = FiniteCheck("skip")
    keras.utils.set_random_seed(4)
    with pytest.warns(UserWarning, match=f"step {BAD + 1}, replica 1"):
        fit(bad, x, y, check)
    assert check.reports[0].first.detail.summary.size == 24
    same(state(bad), state(good))


@pytest.mark.float16
def test_a_scale_that_is_lowered_is_no_error():
    policy = keras.mixed_precision.Policy if IS_KERAS_2 else keras.DTypePolicy
    policy = policy("mixed_float16")
    x, y = data(4)
    models = []
    for callbacks in ([], [FiniteCheck()]):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.layers.Input((6,)),
                keras.layers.Dense(8, activation="tanh", dtype=policy),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        if IS_KERAS_2:
            optimizer = keras.mixed_precision.LossScaleOptimizer(
                keras.optimizers.SGD(0.01), initial_scale=2.0**30
            )
        else:
            optimizer = keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.01), initial_scale=2.0**30
            )
        model.compile(optimizer, "mse", jit_compile=False)
        fit(model, 100 * x, 100 * y, *callbacks, epochs=5)
        models.append(model)
    assert callbacks[0].scaled_down > 3
    assert callbacks[0].reports == []
    for ours, theirs in zip(state(models[1]), state(models[0]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_every_other_step():
    x, y = data(5)
    plain, checked = make(), make()
    keras.utils.set_random_seed(4)
    fit(plain, x, y)
    keras.utils.set_random_seed(4)
    fit(checked, x, y, FiniteCheck(every_n_steps=2))
    same(state(checked), state(plain))


def test_bad_steps_in_a_row_are_those_without_a_good_one_between():
    x, y = data(5)
    x[3] = x[19] = np.nan
    check = FiniteCheck("skip", max_consecutive=1)
    with pytest.warns(UserWarning, match=r"skipped a step: .*\(NaN or infinity in the input\)"):
        fit(make(), x, y, check)
    assert check.skipped == 2


@extended
def test_what_leaving_out_does_not_help_against():
    model = make()
    x, y = data(3)
    model.get_layer("last").bias.assign([np.nan])
    with pytest.raises(NonFiniteError, match="a skipped step changes no weight") as caught:
        fit(model, x, y, FiniteCheck("skip"))
    assert caught.value.report.step == 1


@pytest.mark.slow
@once
def test_a_step_that_was_not_looked_at():
    x, y = data(4)
    x[9] = np.nan
    with pytest.raises(NonFiniteError) as caught:
        fit(make(), x, y, FiniteCheck(every_n_steps=3))
    assert caught.value.report.step == 4
    assert "an unchecked step" in caught.value.report.causes[0].evidence
    assert "The weights before the step are lost: 'sequential" in caught.value.report.note
    assert "Then check each step (every_n_steps=1)" in caught.value.report.note
