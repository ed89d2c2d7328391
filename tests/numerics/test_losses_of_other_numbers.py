"""Losses that are finite with other labels or predictions: the report must name these numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from non_finite_reports import dense, names, report_of
from planted_nan_models import data
from stack_marks import IS_KERAS_2, SOAK_ON_KERAS_2, quick_rows

pytestmark = SOAK_ON_KERAS_2


def pearson(y, p, axis=None):
    y, p = (one - tf.reduce_mean(one, axis, keepdims=True) for one in (y, p))
    squares = tf.reduce_sum(p**2, axis) * tf.reduce_sum(y**2, axis)
    return -tf.reduce_sum(p * y, axis) / tf.sqrt(squares)


def of_columns(y, p):
    return pearson(y, p, 0)


def of_rows(y, p):
    return pearson(y, p, 1)


def ratio_of_deviations(y, p):
    return tf.math.reduce_std(p) / tf.math.reduce_std(y)


def mean_of_logarithms(y, p):
    return tf.reduce_mean(tf.math.log(p) * y)


def roots_of_labels(y, p):
    return tf.reduce_mean(tf.sqrt(y - 2) + p**2)


def with_ones(rows, columns):
    """Returns labels [8, 3] that are 1 in these rows and columns."""
    y = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    y[rows, columns] = 1.0
    return y


ALL = slice(None)
EQUAL = {
    "labels": (pearson, with_ones(ALL, ALL), {}, "all labels of the batch are equal (1)"),
    "labels of 0": (pearson, 0 * with_ones(ALL, ALL), {}, "all labels of the batch are equal (0)"),
    "probabilities": (pearson, with_ones(ALL, ALL), {"activation": "sigmoid"}, "all labels of"),
    "predictions": (
        pearson,
        with_ones(0, 0),
        {"kernel_initializer": "zeros"},
        "all predictions of the batch are equal (0)",
    ),
    "both": (
        pearson,
        with_ones(ALL, ALL),
        {"kernel_initializer": "zeros"},
        "labels of the batch are equal (1) and all predictions of the batch are equal (0), so",
    ),
    "a column": (of_columns, with_ones(ALL, 1), {}, "the same for all examples in column 1"),
    "a row": (of_rows, with_ones(3, ALL), {}, "all labels of an example are equal in row 3"),
    "a divisor": (ratio_of_deviations, with_ones(ALL, ALL), {}, "this deviation is infinite"),
}


@quick_rows("labels", "predictions", "a column", "a row")
@pytest.mark.parametrize("case", EQUAL)
def test_equal_numbers(case):
    loss, y, options, text = EQUAL[case]
    report = report_of(dense(units=3, **options), data(1)[0], y, loss)
    assert names(report) == ["the loss function"]
    (cause,) = report.causes
    assert text in cause.evidence
    assert "so their deviation is 0" in cause.evidence
    assert ("0/0" in cause.evidence) == (case != "a divisor")
    assert "the loss is finite" in cause.evidence
    assert "divisor" in cause.advice
    for word in ("logarithm", "root", "negative", "exponential"):
        assert word not in cause.evidence + cause.advice


OTHERS = {"predictions": mean_of_logarithms, "labels": roots_of_labels}


@quick_rows("labels")
@pytest.mark.parametrize("case", OTHERS)
def test_equal_numbers_that_do_not_explain_the_loss(case):
    """The loss is NaN for negative predictions, or for labels below 2, equal or not."""
    report = report_of(dense(units=3), data(1)[0], with_ones(ALL, ALL), OTHERS[case])
    assert names(report) == ["the loss function"]
    assert "deviation" not in report.causes[0].evidence


class OwnStep(keras.Model):
    """A model whose training step computes its loss without `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3, name="dense")

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = pearson(y, self(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def test_equal_labels_of_a_loss_that_is_not_computed_again():
    report = report_of(OwnStep(), data(1)[0], with_ones(ALL, ALL), None)
    assert names(report) == ["the loss function"]
    said = "all elements of 'y' are equal (1), and a division of 0 by their deviation is 0/0"
    assert said in report.causes[0].evidence


def divergence(y, p):
    """A Kullback-Leibler divergence. It is NaN for a label of 0."""
    return tf.reduce_sum(y * tf.math.log(y / p), -1)


def logarithm_of_labels(y, p):
    return tf.reduce_mean(tf.reduce_sum(p, -1)) - tf.reduce_mean(tf.math.log(y))


def of_classes(y, p):
    """A mean of each class. It is 0/0 for a class without examples."""
    return tf.reduce_mean(tf.reduce_sum(y * p, 0) / tf.reduce_sum(y, 0))


def one_hot(classes):
    return np.eye(3, dtype="float32")[np.arange(8) % classes]


def smooth_beside(rows):
    """Returns one-hot labels in these rows, and labels between 0 and 1 in the other rows."""
    y = one_hot(3) * 0.9 + 0.03
    y[rows] = one_hot(3)[rows]
    return y


ZEROS = {
    "one-hot": (divergence, one_hot(3), "16 of 24 labels are exactly 0, where 0 times log(0)"),
    "without a class": (divergence, one_hot(2), "16 of 24 labels are exactly 0"),
    "two rows": (divergence, smooth_beside([2, 4]), "4 of 24 labels are exactly 0"),
    "only zeros": (divergence, 0 * one_hot(3), "24 of 24 labels are exactly 0"),
    "logarithm": (logarithm_of_labels, one_hot(3), "where log(0) is infinite"),
}


if not IS_KERAS_2:  # Keras 2 converts integers only in `fit`, and not in a single call of a loss
    ZEROS["integers"] = (divergence, one_hot(3).astype("int32"), "16 of 24 labels are exactly 0")


@quick_rows("one-hot", "without*")
@pytest.mark.parametrize("case", ZEROS)
def test_labels_of_zero(case):
    loss, y, text = ZEROS[case]
    report = report_of(dense(units=3, activation="softmax"), data(1)[0], y, loss)
    assert names(report) == ["the loss function"]
    (cause,) = report.causes
    assert text in cause.evidence
    assert "with 0.001 in place of 0, the loss is finite" in cause.evidence
    assert "tf.math.xlogy" in cause.advice
    for word in ("column", "negative", "nothing"):
        assert word not in cause.evidence


def test_a_class_without_examples_is_no_label_of_zero():
    report = report_of(dense(units=3, activation="softmax"), data(1)[0], one_hot(2), of_classes)
    (cause,) = report.causes
    assert "class 2 is absent from the batch" in cause.evidence
    assert "exactly 0" not in cause.evidence


def masked_mse(y, p):
    """A mean over labels other than -1. It is 0/0 if there are none."""
    known = tf.cast(y != -1, p.dtype)
    return tf.reduce_sum(known * (y - p) ** 2) / tf.reduce_sum(known)


def mean_of_classes(y, p):
    """A mean of the errors of the classes 0, 1 and 2. It is 0/0 for a class without examples."""
    errors = [(tf.where(y == c, (p - y) ** 2, 0.0), tf.cast(y == c, p.dtype)) for c in range(3)]
    return tf.add_n([tf.reduce_sum(error) / tf.reduce_sum(mask) for error, mask in errors])


ABSENT = {
    "masked": (masked_mse, np.full((8, 1), -1, "float32"), "(all labels are -1)"),
    "a class": (mean_of_classes, one_hot(2)[:, :1], "(labels: 0 to 1)"),
}


@quick_rows("masked-None")
@pytest.mark.parametrize("activation", [None, "sigmoid"])
@pytest.mark.parametrize("case", ABSENT)
def test_a_mean_over_no_labels(case, activation):
    """Negative predictions are not the cause: the loss is NaN for all predictions."""
    loss, y, labels = ABSENT[case]
    assert all(np.isnan(loss(tf.constant(y), tf.fill(y.shape, p))) for p in (-3.0, 0.5, 2.0))
    (cause,) = report_of(dense(units=1, activation=activation), data(1)[0], y, loss).causes
    assert "other predictions that were tried gives a finite loss " + labels in cause.evidence
    assert "negative number" not in cause.evidence
    assert "nothing" not in cause.evidence
    assert "a mean over no elements" in cause.advice
