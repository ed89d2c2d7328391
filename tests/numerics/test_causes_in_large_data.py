"""Inputs that are finite, and so large that their squares are infinite."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from non_finite_reports import dense, names, report_of
from planted_nan_models import data
from stack_marks import SOAK_ON_KERAS_2

from tfwd.callbacks import FiniteCheck

pytestmark = SOAK_ON_KERAS_2
layers = keras.layers


def image_model():
    return keras.Sequential(
        [
            keras.Input((4, 4, 2)),
            layers.Conv2D(3, 2, kernel_initializer=keras.initializers.Constant(0.4), name="c"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(1, name="last"),
        ]
    )


def deep():
    return dense(layers.Dense(1, name="last"), units=8, activation="relu")


@pytest.mark.parametrize("value", [1e25, 3e38])
@pytest.mark.parametrize("make", [dense, deep, image_model])
def test_an_example_with_an_enormous_number(make, value):
    """The number is in row 3 of a later batch. No gradient grew, and nothing is an exponential."""
    model = make()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, *model.input_shape[1:])).astype("float32")
    x[75, ..., 0] = value
    y = rng.normal(size=(80, 1)).astype("float32")
    report = report_of(model, x, y, optimizer=keras.optimizers.SGD(1e-3))
    assert names(report)[0] == "data that are too large"
    cause = report.causes[0]
    assert f"'x' reaches {value:.3g} in row 3 of the batch" in cause.evidence
    for wrong in ("exponential", "exploding"):
        assert not any(wrong in f"{one.name}{one.evidence}{one.advice}" for one in report.causes)


@pytest.mark.parametrize("row", [2, 5])
def test_an_enormous_number_that_the_model_makes_small(row):
    """The logarithm makes the number small. A root makes NaN, of another number."""
    x, y = data(1)
    x = np.abs(x) + 1
    x[5, 0] = 1e30
    x[row, 1] = 0.01

    def small(v):
        return tf.math.log(v)

    root = layers.Lambda(tf.sqrt, name="root")
    model = keras.Sequential(
        [keras.Input((6,)), layers.Lambda(small, name="log"), root, layers.Dense(1)]
    )
    report = report_of(model, x, y)
    assert report.first.frame.name == "root"
    assert names(report) == ["a function outside its domain"]


@pytest.mark.parametrize("kind", ["LayerNormalization", "GroupNormalization"])
def test_an_example_whose_units_are_equal(kind):
    """The advice for `BatchNormalization` would be wrong: its variance is over the batch."""
    options = {"groups": 1} if kind == "GroupNormalization" else {}
    norm = getattr(layers, kind)(epsilon=0.0, name="norm", **options)
    x, y = data(1)
    x[2] = 0.0
    report = report_of(keras.Sequential([keras.Input((6,)), norm, layers.Dense(1)]), x, y)
    assert names(report) == ["a variance near zero"]
    (cause,) = report.causes
    assert "row 2 of the batch" in cause.evidence
    assert "units before this layer are all the same" in cause.advice
    assert "larger batch" not in cause.advice


def test_large_statistics_do_not_explode():
    """Checks a label whose square is infinite, after an adapted layer with a large variance."""
    rng = np.random.default_rng(0)
    x = 3e3 * rng.normal(size=(24, 6)).astype("float32") + 5e3
    y = np.ones((24, 1), "float32")
    y[19] = 3e19
    adapted = layers.Normalization(name="adapted")
    adapted.adapt(x)
    model = keras.Sequential([keras.Input((6,)), adapted, layers.Dense(1)])
    report = report_of(model, x, y, optimizer=keras.optimizers.Adam(1e-3))
    assert names(report) == ["the loss function"] and report.step == 3


def test_skipped_steps_are_no_updates():
    """Checks that large weights are named in each step, if all steps are skipped."""
    large = keras.initializers.Constant(5e3)
    model = dense(
        layers.Activation("exponential"), layers.Dense(1, name="last"), kernel_initializer=large
    )
    model.compile(keras.optimizers.Adam(1e-3), "mse", jit_compile=False)
    x, y = data(3)
    check = FiniteCheck("skip")
    with pytest.warns(UserWarning, match="skipped"):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[check])
    assert [names(report) for report in check.reports] == [["an overflow in the forward pass"]] * 3
    for report in check.reports[1:]:
        assert "No step has changed the weights yet" in report.causes[0].evidence
