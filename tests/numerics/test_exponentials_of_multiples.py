"""Exponentials of a multiple of moderate numbers: the report must say that they are possible."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from non_finite_reports import Elementwise, dense, layers, names, report_of
from planted_nan_models import data
from stack_marks import SOAK_ON_KERAS_2, quick_rows

pytestmark = SOAK_ON_KERAS_2


def log_sum_exp(y, p):
    return tf.math.log(tf.reduce_sum(tf.exp(p / 0.002), -1)) - p[:, 0]


def mean_of_exponentials(y, p):
    return tf.reduce_mean(tf.exp(500.0 * p))


def logarithms(y, p):
    return -tf.reduce_mean(tf.math.log(tf.nn.relu(p)))


def inverse(y, p):
    return tf.reduce_mean(tf.math.reciprocal(tf.abs(p - p[:1])))


LOSSES = {
    "log-sum-exp": (log_sum_exp, True),
    "mean": (mean_of_exponentials, True),
    "logarithm of 0": (logarithms, False),
    "division by 0": (inverse, False),
}


@quick_rows("log-sum-exp", "logarithm*")
@pytest.mark.parametrize("case", LOSSES)
def test_losses_of_moderate_predictions(case):
    loss, is_exponential = LOSSES[case]
    report = report_of(dense(units=3), *data(1), loss)
    assert report.sentence.startswith(f"loss '{loss.__name__}': +Inf")
    (cause,) = report.causes
    assert cause.name == "the loss function"
    assert ("this fits an exponential of a multiple of z" in cause.evidence) == is_exponential
    assert ("tf.reduce_logsumexp" in cause.advice) == is_exponential
    assert ("divisor" in cause.advice) == (not is_exponential)


def exponentials(x):
    return tf.exp(300 * x)


def products(x):
    return 1e38 * (2 + x) ** 2 * tf.sign(x)


FUNCTIONS = {
    "exponential": (lambda: Elementwise(exponentials, name="odd"), True),
    "Lambda": (lambda: layers.Lambda(exponentials, name="odd"), True),
    "product": (lambda: Elementwise(products, name="odd"), False),
    "Dense": (lambda: layers.Dense(3, kernel_initializer=LARGE, name="odd"), False),
}
LARGE = keras.initializers.Constant(2e38)


@quick_rows("exponential", "product")
@pytest.mark.parametrize("case", FUNCTIONS)
def test_layers_with_moderate_inputs(case):
    layer, is_exponential = FUNCTIONS[case]
    x, y = data(1)
    first = layers.Dense(4, "tanh", name="first")
    model = keras.Sequential([layers.Input((6,)), first, layer(), layers.Dense(1, name="last")])
    report = report_of(model, 2 * np.abs(x), y)
    assert report.first.frame.name == "odd"
    said = "this fits an exponential of a multiple of the input"
    assert any(said in cause.evidence for cause in report.causes) == is_exponential
    if is_exponential:
        assert names(report) == ["an overflow in the forward pass"]
        assert "if the code has an exponential" in report.causes[0].advice
