"""Updates that are not finite because the square of a finite gradient overflows.

The predictions are 0. For inputs x and labels y, the gradient of the mean squared error is -2 x y.
"""

import keras
import numpy as np
import pytest
from non_finite_reports import Times, dense, layers, names, own_output, report_of
from stack_marks import needs_keras3, quick_rows

optimizers = keras.optimizers
SQUARE = "a gradient whose square overflows"


def report_for(optimizer, x, y, rows=8):
    inputs, labels = np.full((rows, 6), x, "float32"), np.full((rows, 1), y, "float32")
    return report_of(dense(kernel_initializer="zeros"), inputs, labels, optimizer=optimizer)


OPTIMIZERS = {
    "Adam": lambda: optimizers.Adam(),
    "Adam with a small rate": lambda: optimizers.Adam(1e-30, epsilon=1.0),
    "RMSprop": lambda: optimizers.RMSprop(),
    "centered RMSprop": lambda: optimizers.RMSprop(centered=True),
    "Ftrl": lambda: optimizers.Ftrl(),
    "Adafactor": lambda: optimizers.Adafactor(),
    "global_clipnorm": lambda: optimizers.SGD(global_clipnorm=1.0),
}


@quick_rows("Adam with*", "global_clipnorm")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_square_of_a_gradient(name):
    (cause,) = report_for(OPTIMIZERS[name](), 100.0, 1e18).causes
    assert cause.name == SQUARE
    assert "The largest gradient is 2e+20, of " in cause.evidence
    assert "Its square exceeds 3.4e+38, the largest float32." in cause.evidence
    assert "'y' reaches 1e+18." in cause.evidence
    assert "scale the data, the labels or the loss" in cause.advice
    assert "far below 1.84e+19" in cause.advice  # the root of 3.4e38
    assert "clipvalue=1.0" in cause.advice
    for word in ("learning rate", "epsilon", "clipnorm=1.0"):
        assert word not in cause.advice
    is_global = name == "global_clipnorm"
    assert ("adds the squares of all gradients for global_clipnorm" in cause.evidence) == is_global
    assert ("in place of global_clipnorm" in cause.advice) == is_global


def test_the_sum_of_squares_of_all_gradients():
    """The seven gradients are 1.6e19. Each square is 2.6e38, and their sum is 1.8e39."""
    report = report_for(optimizers.SGD(global_clipnorm=1.0), 1.0, 8e18, rows=2)
    (cause,) = report.causes
    assert cause.name == SQUARE
    assert "The largest gradient is 1.6e+19" in cause.evidence
    assert "Their sum may exceed 3.4e+38, the largest float32." in cause.evidence


def test_the_product_of_rate_and_gradient_is_no_square():
    """The product is 1e30 times 2e20. SGD does not square gradients."""
    report = report_for(optimizers.SGD(1e30), 100.0, 1e18)
    assert SQUARE not in names(report)
    assert all("lower the learning rate" in cause.advice for cause in report.causes)


def test_a_gradient_that_grows_until_its_square_overflows():
    """The gradient of step 8 is 1e10 * 32**7, or 3.4e20. In step 7, it is 1.1e19."""
    x = np.repeat(32.0 ** np.arange(9), 8)[:, None].astype("float32")
    large = layers.Lambda(lambda v: v * 1e10, name="large")
    model = keras.Sequential([layers.Input((1,)), Times(name="times"), large])
    report = report_of(model, x, np.zeros_like(x), own_output, optimizers.Adam(0.0))
    assert report.step == 8
    assert names(report) == ["exploding gradients", SQUARE]
    assert "The largest gradient is 3.44e+20" in report.causes[1].evidence
    assert report.causes[1].advice.endswith(
        "If earlier steps made weights large, lower the learning rate."
    )
    assert "global_clipnorm" not in str(report)


@needs_keras3("gradient_accumulation_steps")
@pytest.mark.parametrize("name", ["Adam", "global_clipnorm"])
def test_the_square_of_a_mean_of_several_steps(name):
    """The gradient of the second of three steps is 3e20. Their mean is 1e20."""
    options = {"global_clipnorm": 1.0} if name == "global_clipnorm" else {}
    kind = optimizers.SGD if options else optimizers.Adam
    optimizer = kind(1e-3, gradient_accumulation_steps=3, **options)
    y = np.repeat([1.0, 3e20, 1.0], 8)[:, None].astype("float32")
    x = np.ones((24, 6), "float32")
    model = dense(kernel_initializer="zeros")
    report = report_of(model, x, y, lambda y, p: y * p, optimizer)
    assert (report.step, names(report)) == (3, [SQUARE])
    (cause,) = report.causes
    assert "gradient_accumulation_steps=3" in cause.evidence
    assert (
        "reaches 1 in this step, and the sum of the earlier steps reaches 3e+20" in cause.evidence
    )
    assert "clipvalue=1.0" in cause.advice
