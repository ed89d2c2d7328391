"""Losses that are infinite only because of sample weights, class weights or loss_weights.

All predictions are 6 and all labels are 8, so each mean squared error is 4 without weights.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from non_finite_reports import layers, names
from stack_marks import quick_rows

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError

X, Y = np.ones((8, 6), "float32"), np.full((8, 1), 8.0, "float32")
HUGE = 3e38  # 4 times this number exceeds float32, whose largest number is 3.4e38


def head(name):
    return layers.Dense(1, kernel_initializer="ones", name=name)


def weights_with(value, row=2):
    weights = np.ones(8, "float32")
    weights[row] = value
    return weights


def report_of_fit(model, y=Y, loss="mse", loss_weights=None, **fitted):
    model.compile("sgd", loss, loss_weights=loss_weights)
    with pytest.raises(NonFiniteError) as caught:
        model.fit(X, y, shuffle=False, verbose=0, callbacks=[FiniteCheck()], **fitted)
    return caught.value.report


def two_heads(named):
    inputs = layers.Input((6,))
    outputs = {name: head(name)(inputs) for name in "ab"}
    return keras.Model(inputs, outputs if named else list(outputs.values()))


def for_heads(a, b, named):
    return {"a": a, "b": b} if named else [a, b]


@quick_rows("loss_weights-True", "sample_weight-False")
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", ["loss_weights", "sample_weight"])
def test_the_output_whose_weight_makes_its_loss_infinite(kind, named):
    if kind == "loss_weights":
        given = {"loss_weights": for_heads(1.0, HUGE, named)}
    else:
        given = {"sample_weight": for_heads(weights_with(1.0), weights_with(HUGE), named)}
    losses, labels = (for_heads(one, one, named) for one in ("mse", Y))
    report = report_of_fit(two_heads(named), labels, losses, **given)
    assert report.sentence.startswith("loss 'mse' of output 'b': +Inf, step 1")
    assert report.first.frame.outputs == ("b",)
    assert all("'a'" not in cause.evidence for cause in report.causes)


CASES = {  # the arguments of the fit, words of the evidence, and words of the advice
    "sample_weight": (
        {"sample_weight": weights_with(HUGE)},
        "'sample_weight' reaches 3e+38 in row 2 of the batch.",
        "smaller sample weights, or a smaller class_weight in fit: for example, divide them by",
    ),
    "negative": (
        {"sample_weight": weights_with(-HUGE, row=5)},
        "'sample_weight' reaches -3e+38 in row 5 of the batch.",
        "smaller sample weights",
    ),
    "all samples": (
        {"sample_weight": np.full(8, HUGE, "float32")},
        "'sample_weight' reaches 3e+38.",
        "smaller sample weights",
    ),
    "loss_weights": (
        {"loss_weights": [HUGE]},
        "Its weight in loss_weights is 3e+38, and their product is not finite.",
        "smaller loss_weights in compile: for example, divide them by their mean",
    ),
    # Each product with 4 is finite. The product of all three is 4e40.
    "both": (
        {"sample_weight": weights_with(1e20), "loss_weights": [1e20]},
        "'sample_weight' reaches 1e+20 in row 2 of the batch. The weight in loss_weights is 1e+20.",
        "use smaller loss_weights too",
    ),
}


@quick_rows("sample_weight", "loss_weights", "both")
@pytest.mark.parametrize("case", CASES)
def test_weights_that_make_the_loss_infinite(case):
    given, evidence, advice = CASES[case]
    report = report_of_fit(keras.Sequential([layers.Input((6,)), head("a")]), **given)
    (cause,) = report.causes
    assert cause.name == "weights of the loss that are too large"
    assert "Without weights, the loss 'mse' is 4." in cause.evidence
    assert evidence in cause.evidence
    assert advice in cause.advice
    for word in ("exponential", "logarithm", "divisor"):
        assert word not in str(report)


@quick_rows("class_weight")
@pytest.mark.parametrize("by", ["class_weight", "sample_weight"])
def test_a_class_weight_that_makes_the_loss_infinite(by):
    """The labels are the classes 0 and 1. The errors are 6 and 5 without weights."""
    classes = np.arange(8) % 2
    model = keras.Sequential([layers.Input((6,)), head("a")])
    given = {"class_weight": {0: 1.0, 1: HUGE}} if by[0] == "c" else {}
    given = given or {"sample_weight": weights_with(HUGE, row=3)}  # one example of the class
    (cause,) = report_of_fit(model, classes[:, None].astype("float32"), **given).causes
    assert cause.name == "weights of the loss that are too large"
    assert "the loss 'mse' is 30.5." in cause.evidence  # (36 + 25) / 2
    assert ("reaches 3e+38 in all examples of class 1, and" in cause.evidence) == (by[0] == "c")
    assert ("smaller numbers in class_weight of fit" in cause.advice) == (by[0] == "c")


def test_the_weights_of_one_of_several_outputs():
    weights = {"a": weights_with(1.0), "b": weights_with(HUGE)}
    losses, labels = (for_heads(one, one, True) for one in ("mse", Y))
    (cause,) = report_of_fit(two_heads(True), labels, losses, sample_weight=weights).causes
    assert "the loss 'mse' of output 'b' is 4." in cause.evidence
    assert "'sample_weight['b']' reaches 3e+38 in row 2 of the batch." in cause.evidence


class MeanByWeights(keras.losses.Loss):
    """A loss that divides by the sum of the sample weights."""

    def __call__(self, y, p, sample_weight=None):
        weights = tf.ones(8) if sample_weight is None else tf.cast(sample_weight, tf.float32)
        return tf.reduce_sum((p - y)[:, 0] ** 2 * weights) / tf.reduce_sum(weights)


@quick_rows("labels")
@pytest.mark.parametrize("case", ["labels", "divisor"])
def test_weights_that_are_not_too_large(case):
    """The square of a label is infinite, or the weights add up to 0 on every scale."""
    labels, loss, weights = Y.copy(), "mse", weights_with(HUGE)
    if case == "labels":
        labels[2] = 3e19
    else:
        loss, weights = MeanByWeights(), np.tile([8.0, -8.0], 4).astype("float32")
        labels[3] = 9.0
    model = keras.Sequential([layers.Input((6,)), head("a")])
    report = report_of_fit(model, labels, loss, sample_weight=weights)
    assert "weights of the loss that are too large" not in names(report)


def inverse(y, p):
    return tf.reduce_sum(1 / (p - y), -1)


@quick_rows("sample_weight")
@pytest.mark.parametrize("kind", ["sample_weight", "loss_weights"])
def test_a_weight_of_0_times_an_infinite_loss(kind):
    """The product is NaN. The loss itself is infinite, so it divides by 0, but not 0 by 0."""
    labels = Y.copy()
    labels[2] = 6.0  # the prediction
    given = {"sample_weight": weights_with(0.0)} if kind[0] == "s" else {"loss_weights": [0.0]}
    model = keras.Sequential([layers.Input((6,)), head("a")])
    report = report_of_fit(model, labels, inverse, **given)
    (cause,) = report.causes
    assert "the loss 'inverse' is not: " in cause.evidence
    assert "non-finite values are only in row 2" in cause.evidence
    what = "sample weight" if kind[0] == "s" else "weight in loss_weights"
    assert f"an infinite loss times a {what} of 0 is NaN" in cause.evidence
    assert f"a {what} of 0 does not leave out an infinite loss" in cause.advice


def logarithm(y, p):
    return tf.reduce_sum(tf.math.log(p - y), -1)


def test_an_infinite_loss_beside_one_that_is_nan():
    """Their sum is NaN. Each output's cause says if its own loss is NaN or infinite."""
    labels = [np.full((8, 1), 6.0, "float32"), Y]
    report = report_of_fit(two_heads(False), labels, [inverse, logarithm])
    infinite, nan = [cause.evidence for cause in report.causes]
    assert "the loss 'inverse' of output 'a' is not: " in infinite
    assert "the loss 'logarithm' of output 'b' is NaN: " in nan
