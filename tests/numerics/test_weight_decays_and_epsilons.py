"""Optimizers whose weight decay makes weights grow, or whose epsilon is 0."""

import keras
import pytest
from non_finite_reports import dense, layers, names, report_of
from planted_nan_models import data
from stack_marks import quick_rows

optimizers = keras.optimizers
DECAYS = {
    "AdamW": lambda: optimizers.AdamW(1.0, weight_decay=500.0),
    "clipped": lambda: optimizers.AdamW(1.0, weight_decay=500.0, global_clipnorm=1.0),
    "SGD": lambda: optimizers.SGD(0.01, weight_decay=5e4, clipvalue=1.0),
    "schedule": lambda: optimizers.AdamW(
        optimizers.schedules.PiecewiseConstantDecay([1000], [1.0, 0.1]), weight_decay=500.0
    ),
}


@quick_rows("AdamW", "SGD")
@pytest.mark.parametrize("name", DECAYS)
def test_a_weight_decay_above_the_limit(name):
    x, y = data(1)
    report = report_of(dense(), x, y, optimizer=DECAYS[name](), epochs=60)
    assert names(report)[0] == "exploding gradients"
    (cause, *_) = report.causes
    assert "This factor is -499. It is below -1, so these weights grow" in cause.evidence
    assert cause.advice.startswith("use a smaller weight_decay or learning rate")
    assert "clip" not in cause.advice


def test_a_weight_decay_that_overflows_in_one_update():
    x, y = data(1)
    report = report_of(dense(), x, y, optimizer=optimizers.SGD(1e20, weight_decay=1e19))
    assert names(report) == ["an update out of range"]
    assert "This factor is -1e+39" in report.causes[0].evidence
    assert report.causes[0].advice.startswith("use a smaller weight_decay")


def test_a_weight_decay_that_makes_weights_smaller():
    x, y = data(1)
    optimizer = optimizers.SGD(0.9, weight_decay=1e-3)
    report = report_of(dense(), 5 * x, y, optimizer=optimizer, epochs=60)
    assert names(report)[0] == "exploding gradients"
    assert "weight_decay" not in str(report)


EPSILONS = {
    "Adam": ("Adam", 0.0, "float32", "The optimizer's epsilon is 0. Adam divides"),
    "RMSprop": ("RMSprop", 0.0, "float32", "The optimizer's epsilon is 0. RMSprop divides"),
    "float16": ("Adam", 1e-8, "float16", "epsilon is 1e-08, which may count as 0 in float16"),
}


@quick_rows("Adam", "float16")
@pytest.mark.parametrize("case", EPSILONS)
def test_an_epsilon_of_zero(case):
    """One input is 0 in all examples, so one element of the gradient is 0."""
    kind, epsilon, dtype, text = EPSILONS[case]
    x, y = (one.astype(dtype) for one in data(1))
    x[:, 2] = 0
    model = keras.Sequential([layers.Input((6,), dtype=dtype), layers.Dense(1, dtype=dtype)])
    report = report_of(model, x, y, optimizer=getattr(optimizers, kind)(0.01, epsilon=epsilon))
    assert names(report) == ["an update out of range"]
    (cause,) = report.causes
    assert text in cause.evidence
    assert "kernel' has 1 zero. If" in cause.evidence
    assert "the update is 0/0" in cause.evidence
    assert cause.advice.startswith("use a larger epsilon")
    assert "learning rate" not in cause.advice
