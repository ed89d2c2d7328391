"""Losses whose report must name rows, or must not name a reason that does not hold.

The oracle is the loss itself, computed with other numbers in the test.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from non_finite_reports import names, report_of
from stack_marks import SOAK_ON_KERAS_2, quick_rows

pytestmark = SOAK_ON_KERAS_2
RNG = np.random.default_rng(1)
X = RNG.normal(size=(8, 6)).astype("float32")


def identity():
    """Returns a model whose predictions are its inputs."""
    return keras.Sequential(
        [keras.layers.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")]
    )


def of_large_weights(units, scale, activation=None):
    kernel = keras.initializers.RandomNormal(0, scale, seed=1)
    return keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(units, activation, kernel_initializer=kernel, name="out"),
        ]
    )


def masked_entropy(y, p):
    """A mean over labels of at least 0. For one masked label it is 0/0."""
    known = y >= 0
    losses = tf.where(known, -tf.math.log(tf.where(known, p, 1.0)), 0.0)
    return tf.reduce_sum(losses) / tf.reduce_sum(tf.cast(known, p.dtype))


@quick_rows("0.0")
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_masked_rows_are_not_bad(value):
    y = np.array([1, -1, 1, 0, 1, -1, 0, 1], "float32")[:, None]
    p = np.linspace(0.2, 0.9, 8).astype("float32")[:, None]
    assert np.isfinite(masked_entropy(y, p))
    p[2] = value
    assert not np.isfinite(masked_entropy(y, p))
    (cause,) = report_of(identity(), p, y, masked_entropy).causes
    assert "its non-finite values are in row 2 of the batch" in cause.evidence


def gaussian(y, p):
    """A likelihood with the logarithm of the variance in column 1. `exp(-p)` overflows."""
    return 0.5 * p[:, 1] + 0.5 * (y[:, 0] - p[:, 0]) ** 2 * tf.exp(-p[:, 1])


def cox(y, p):
    return -tf.reduce_sum(y * (p - tf.math.log(tf.cumsum(tf.exp(p))))) / tf.reduce_sum(y)


LARGE = {"likelihood": (gaussian, 2), "proportional hazards": (cox, 1)}


@quick_rows("likelihood")
@pytest.mark.parametrize("case", LARGE)
def test_predictions_whose_exponential_overflows(case):
    loss, units = LARGE[case]
    y = np.array([0, 1, 0, 1, 1, 0, 1, 0], "float32")[:, None] + (case == "likelihood")
    model = of_large_weights(units, 100.0)
    p = model.predict(X, verbose=0)
    assert not np.isfinite(loss(y, p)).all()
    assert np.isfinite(loss(y, p * 1e-3)).all()
    report = report_of(model, X, y, loss)
    assert names(report) == ["the loss function"]
    (cause,) = report.causes
    assert f"reach {np.abs(p).max():.3g}, and it is finite if they are scaled" in cause.evidence
    assert "negative" not in cause.evidence
    assert "exponential" in cause.advice


def entropy(y, p):
    return tf.reduce_sum((y - p) ** 2, -1) + tf.reduce_sum(p * tf.math.log(p), -1)


def test_predictions_of_0_beside_an_absent_class():
    """The absent class is not the reason: other labels give no finite loss either."""
    y = np.eye(3, dtype="float32")[np.arange(8) % 2]
    model = of_large_weights(3, 200.0, "softmax")
    p = model.predict(X, verbose=0)
    assert (p == 0).any(1).all()
    assert not np.isfinite(entropy(np.full_like(y, 1 / 3), p)).any()
    (cause,) = report_of(model, X, y, entropy).causes
    assert "the predictions reach 0 and 1 exactly" in cause.evidence
    assert "column" not in cause.evidence


def contrast(y, p):
    """An entropy of similarities with a small temperature, which underflow."""
    e = tf.exp((tf.math.l2_normalize(p, -1) - 1) / 0.005)
    return -tf.math.log(tf.reduce_sum(y * e, -1) / tf.reduce_sum(e, -1))


def test_a_loss_that_is_bad_for_positive_predictions_too():
    y = np.eye(3, dtype="float32")[np.arange(8) % 3]
    model = of_large_weights(3, 1.0)
    p = model.predict(X, verbose=0)
    assert not np.isfinite(contrast(y, np.abs(p))).all()
    assert np.isfinite(contrast(y, np.full_like(p, 20))).all()  # so the labels are not the reason
    (cause,) = report_of(model, X, y, contrast).causes
    assert "negative number" not in cause.evidence
    assert "none of" not in cause.evidence


def over_deviation(y, p):
    """The loss of a single example is 0/0: it needs the deviation of the batch."""
    return tf.reduce_mean(tf.exp(p), -1) / tf.math.reduce_std(y)


def test_a_loss_that_needs_several_examples():
    y, p = np.linspace(0, 1, 8, dtype="float32")[:, None], np.full((8, 1), 0.5, "float32")
    p[3] = 100  # exp(100) is infinite
    bad = ~np.isfinite(over_deviation(y, p))
    assert np.array_equal(np.flatnonzero(bad), [3])
    assert not any(np.isfinite(over_deviation(y[i : i + 1], p[i : i + 1])) for i in range(8))
    (cause,) = report_of(identity(), p, y, over_deviation).causes
    assert "its non-finite values are in row 3 of the batch" in cause.evidence


def test_the_rows_of_a_random_loss_are_not_known():
    """The loss has other non-finite rows each time."""

    def loss(y, p):
        return (p - y)[:, 0] ** 2 + tf.math.log(tf.random.uniform(tf.shape(p)[:1]) - 0.3)

    keras.utils.set_random_seed(1)
    y = np.linspace(0.1, 1, 8, dtype="float32")[:, None]
    (cause,) = report_of(identity(), 2 * y, y, loss).causes
    assert "row" not in cause.evidence


def root(y, p):
    return tf.reduce_mean(tf.sqrt(p - y), -1)


def test_a_prediction_of_0_that_is_not_the_reason():
    """The root of p - y is NaN for each prediction below the label."""
    y = np.full((8, 1), 0.1, "float32")
    p = np.linspace(0.2, 0.9, 8, dtype="float32")[:, None]
    p[2] = 0
    assert np.flatnonzero(np.isnan(root(y, np.maximum(p, 0.001)))) == [2]
    (cause,) = report_of(identity(), p, y, root).causes
    assert "only in row 2 of the batch" in cause.evidence
    assert "exactly" not in cause.evidence
