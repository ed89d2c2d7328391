"""Causes in loss functions and added losses: the report must name them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from non_finite_reports import dense, names, report_of
from planted_nan_models import data
from stack_marks import SOAK_ON_KERAS_2, quick_rows

pytestmark = SOAK_ON_KERAS_2
layers = keras.layers


def log_loss(y, p):
    return -tf.reduce_mean(y * tf.math.log(p) + (1 - y) * tf.math.log(1 - p), -1)


def test_logarithm_of_zero():
    x, y = data(2)
    model = dense(activation="sigmoid", kernel_initializer=keras.initializers.Constant(80.0))
    report = report_of(model, x, (y > 0).astype("float32"), log_loss)
    assert names(report) == ["the loss function"]
    assert report.sentence.startswith("loss 'log_loss': ")
    assert "exactly, where a logarithm is infinite" in report.causes[0].evidence


class Adds(layers.Layer):
    """Adds the root of negative numbers to the loss."""

    def call(self, inputs):
        self.add_loss(tf.reduce_mean(tf.sqrt(-tf.abs(inputs) - 1.0)))
        return inputs


class Whole(keras.Model):
    """A model that adds a loss in its own call."""

    def __init__(self):
        super().__init__(name="adds")
        self.inner = layers.Dense(1, kernel_regularizer="l2", name="inner")

    def call(self, inputs):
        outputs = self.inner(inputs)
        self.add_loss(tf.reduce_sum(tf.sqrt(outputs - 1e2)))
        return outputs


class LogarithmOfZero(keras.regularizers.Regularizer):
    def __call__(self, weight):
        return tf.reduce_sum(tf.math.log(weight * 0))


ADDED = {
    "regularizer": lambda: dense(
        layers.Dense(1, name="adds", kernel_regularizer=LogarithmOfZero())
    ),
    "activity": lambda: dense(
        layers.Dense(1, name="adds", activity_regularizer=lambda a: tf.reduce_sum(tf.sqrt(a - 1e2)))
    ),
    "add_loss": lambda: dense(Adds(name="adds")),
    "model": Whole,
}


@quick_rows("activity", "add_loss")
@pytest.mark.parametrize("kind", ADDED)
def test_losses_that_layers_add(kind):
    """Checks that the loss function is not blamed, because it is finite."""
    x, y = data(2)
    report = report_of(ADDED[kind](), x, y)
    value = "-Inf" if kind == "regularizer" else "NaN"
    assert report.sentence.startswith(f"loss that layer 'adds' adds: {value}, step 1")
    assert names(report) == ["a loss that a layer adds"]
    assert report.where == "layer adds"


def inputs_with_a_large_row(row):
    """Returns 8 inputs. A sigmoid of the large row is exactly 0 or 1."""
    x = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
    x[row] *= 1e4
    return x


def several_labels():
    return (np.random.default_rng(1).random((8, 5)) > 0.4).astype("float32")


def zeros_in_a_good_row():
    labels = several_labels()
    labels[6] = 0
    return labels


def soft_labels():
    return (np.random.default_rng(1).random((8, 5)) * 0.8 + 0.1).astype("float32")


@quick_rows("zeros_in_a_good_row")
@pytest.mark.parametrize("labels", [several_labels, zeros_in_a_good_row, soft_labels])
def test_labels_whose_loss_is_finite_in_other_rows(labels):
    """Only the predictions of row 3 are the cause. The same labels give finite losses elsewhere."""
    x, y = inputs_with_a_large_row(3), labels()
    (cause,) = report_of(dense(units=5, activation="sigmoid"), x, y, log_loss).causes
    assert cause.name == "the loss function"
    assert "its non-finite values are only in row 3 of the batch" in cause.evidence
    assert "the predictions reach 0 and 1 exactly" in cause.evidence
    for word in ("'y'", "class", "row 6"):
        assert word not in cause.evidence


def of_mean_labels(y, p):
    """Is 0/0 if all labels are 0."""
    return tf.reduce_sum(y / tf.reduce_sum(y, -1, keepdims=True) * p, -1)


def of_remaining_labels(y, p):
    """Is the logarithm of -1 if three labels are 1."""
    return tf.math.log(2.0 - tf.reduce_sum(y, -1)) + p[:, 0]


@quick_rows("of_mean_labels*")
@pytest.mark.parametrize(
    ("loss", "label", "what"),
    [
        (of_mean_labels, 0.0, "all elements of 'y' are 0 in row 2 of the batch"),
        (of_remaining_labels, 1.0, "'y' is not a distribution in row 2 of the batch: its elements"),
    ],
)
def test_labels_of_the_row_whose_loss_is_not_finite(loss, label, what):
    """The predictions of row 6 reach 0 and 1, which does no harm."""
    x, y = inputs_with_a_large_row(6), np.eye(3, dtype="float32")[np.arange(8) % 3]
    y[2] = label
    (cause,) = report_of(dense(units=3, activation="sigmoid"), x, y, loss).causes
    assert "its non-finite values are only in row 2 of the batch" in cause.evidence
    assert what in cause.evidence
    assert "predictions reach" not in cause.evidence


@pytest.mark.slow
def test_targets_that_are_no_distributions():
    x, _ = data(2)
    y = np.eye(3, dtype="float32")[np.arange(16) % 3] - 0.5

    def loss(y, p):
        return tf.reduce_sum(y * tf.math.log(y), -1) + tf.reduce_sum(p * p, -1)

    report = report_of(dense(units=3, activation="softmax"), x, y, loss)
    assert names(report) == ["the loss function"]
    assert "'y' are not distributions" in report.causes[0].evidence


def test_labels_of_a_regression_are_no_distributions_either():
    """Labels from 0 to 1 that are not classes need not add up to 1."""
    x, _ = data(2)
    y = np.random.default_rng(0).uniform(0.1, 0.9, (16, 3)).astype("float32")

    def loss(y, p):
        return tf.reduce_mean(tf.math.log(p - y), -1)

    (cause,) = report_of(dense(units=3, kernel_initializer="zeros"), x, y, loss).causes
    assert "distribution" not in cause.evidence


@pytest.mark.slow
def test_absent_class():
    x, _ = data(2)
    y = np.eye(3, dtype="float32")[np.arange(16) % 2]  # never class 2

    def balanced(y, p):
        return tf.reduce_mean(tf.reduce_sum(y * p, 0) / tf.reduce_sum(y, 0))

    report = report_of(dense(units=3, activation="softmax"), x, y, balanced)
    assert names(report) == ["the loss function"]
    assert "class 2 is absent from the batch" in report.causes[0].evidence


@pytest.mark.slow
def test_nothing_left_of_sample_weights():
    x, y = data(2)
    weights = np.r_[np.ones(8), np.zeros(8)].astype("float32")

    class Divided(keras.losses.Loss):
        """Returns the mean over the examples that count."""

        def __call__(self, y, p, sample_weight=None):
            squares = tf.reduce_sum((p - y) ** 2, -1) * sample_weight
            return tf.reduce_sum(squares) / tf.reduce_sum(sample_weight)

    report = report_of(dense(), x, y, Divided(), sample_weight=weights)
    assert report.step == 2
    assert "a division of 0 by 0" in names(report)
    assert "'sample_weight' is 0 for all 8 examples" in str([c.evidence for c in report.causes])


@pytest.mark.slow
def test_a_mean_of_nothing():
    x, y = data(2)

    def positive(labels, predictions):
        return tf.reduce_mean(tf.boolean_mask((predictions - labels) ** 2, labels > 99.0))

    (cause,) = report_of(dense(), abs(x), y, positive).causes
    assert "a mean over no elements" in cause.advice


def logarithm(name):
    return layers.Lambda(lambda v: tf.math.log(v), name=name)


def test_sample_weights_do_not_explain_the_forward_pass():
    """The logarithms of negative outputs are NaN before the loss uses the weights."""
    x, y = data(1)
    model = dense(logarithm("log"), layers.Dense(1, name="last"), units=4)
    report = report_of(model, x, y, sample_weight=np.zeros(8))
    assert report.first.frame.name == "log"
    assert names(report) == ["a function outside its domain"]


def test_zeros_of_a_parallel_layer():
    """The logarithm takes the outputs of 'second', and not the zeros of 'first'."""
    x, y = data(1)
    inputs = layers.Input((6,))
    first = layers.Dense(4, kernel_initializer="zeros", name="first")(inputs)
    second = logarithm("log")(layers.Dense(4, name="second")(inputs))
    outputs = layers.Dense(1)(layers.Concatenate()([first, second]))
    report = report_of(keras.Model(inputs, outputs), x, y)
    assert report.first.frame.name == "log"
    assert names(report) == ["a function outside its domain"]


@pytest.mark.parametrize("initial", ["zeros", "glorot_uniform"])
def test_zeros_whose_logarithm_the_loss_takes(initial):
    """The loss is 0 times infinity for a prediction of 0, and not 0/0."""
    x, y = data(1)
    model = dense(activation="relu", kernel_initializer=initial)
    report = report_of(model, x, 0 * y, lambda y, p: -tf.reduce_mean(y * tf.math.log(p), -1))
    assert names(report) == ["the loss function"]
    assert "only there column 0 of the predictions is 0" in report.causes[0].evidence


def test_a_mean_over_no_labels():
    """Nothing is said of labels that are no classes, or of signs that all rows have."""
    x = np.ones((8, 6), "float32")
    y = -np.random.default_rng(0).uniform(1, 2, (8, 3)).astype("float32")

    def loss(y, p):
        chosen = tf.cast(y > 0, tf.float32)
        mean = tf.reduce_sum((y - p) ** 2 * chosen) / tf.reduce_sum(chosen)
        return mean + tf.zeros(tf.shape(y)[0])

    (cause,) = report_of(dense(units=3), x, y, loss).causes
    assert cause.name == "the loss function"
    assert "distribution" not in cause.evidence
    assert "only there" not in cause.evidence
    assert "a mean over no elements" in cause.advice


def log_sum_exp(y, z):
    return tf.math.log(tf.reduce_sum(tf.exp(z), -1)) - z[:, 0]


def entropy_of_logits(y, z):
    return tf.reduce_mean(tf.math.log(1 + tf.exp(-z)) + (1 - y) * z, -1)


def poisson(y, z):
    return tf.reduce_mean(tf.exp(z) - y * z, -1)


def roots_of_labels(y, z):
    """A loss that is NaN because of the label."""
    return tf.reduce_mean(tf.sqrt(y) + z**2, -1)


def logits(units=1):
    """A model whose prediction is the first feature, or the first features."""
    return dense(units=units, use_bias=False, kernel_initializer="identity")


EXPONENTIALS = {
    "log-sum-exp": (log_sum_exp, 3, 400.0, {}, "above 88.7"),
    "entropy": (entropy_of_logits, 1, -400.0, {}, "below -88.7"),
    "entropy with a large good row": (entropy_of_logits, 1, -400.0, {4: 300.0}, "below -88.7"),
    "poisson": (poisson, 1, 120.0, {4: -300.0}, "above 88.7"),
}


@quick_rows("log-sum-exp", "entropy with*")
@pytest.mark.parametrize("row", EXPONENTIALS)
def test_an_exponential_of_large_predictions(row):
    loss, units, value, others, bound = EXPONENTIALS[row]
    x, y = data(1)
    x[:, 0] = 0.5
    x[6, 0] = value
    for other, large in others.items():
        x[other, 0] = large
    report = report_of(logits(units), x, np.abs(y), loss)
    assert names(report) == ["the loss function"]
    (cause,) = report.causes
    assert f"in row 6 of the batch, and only there predictions z are {bound}" in cause.evidence
    assert f"{value:.3g}" in cause.evidence
    for part in ("tf.reduce_logsumexp", "tf.nn.softplus", "from_logits=True", "clip"):
        assert part in cause.advice
    assert "divisor" not in cause.advice


def log_cosh(labels, predicted):
    return tf.reduce_mean(tf.math.log(tf.math.cosh(predicted - labels)), -1)


def mean_exponential_error(labels, predicted):
    return tf.reduce_mean(tf.math.exp(labels - predicted), -1)


@pytest.mark.parametrize("loss", [log_cosh, mean_exponential_error])
def test_an_exponential_of_large_differences(loss):
    """Large predictions beside equal labels are no cause."""
    x, y = data(1)
    y = np.asarray(x[:, :1]).copy()
    x[4, 0], y[4] = -300.0, -300.0
    y[6] = 200.0
    report = report_of(logits(), x, y, loss)
    assert names(report) == ["the loss function"]
    (cause,) = report.causes
    assert "in row 6 of the batch, and only there predictions and labels differ" in cause.evidence
    assert "by more than 88.7" in cause.evidence
    assert "scale or clip the labels" in cause.advice
    assert "LogCosh" in cause.advice


def logarithm_of_95_minus_error(labels, predicted):
    return -tf.math.log(95.0 - tf.abs(labels - predicted)[:, 0])


def test_large_differences_that_do_not_explain_the_loss():
    """The loss is finite for a difference of 90, above the limit of an exponential."""
    x, y = data(1)
    y[6] = 200.0
    report = report_of(logits(), x, y, logarithm_of_95_minus_error)
    assert not any("exponential of such" in cause.evidence for cause in report.causes)


def logarithm_of_95_minus(labels, predicted):
    """A loss that is NaN for predictions above 95, which are above the limit of an exponential."""
    return -tf.math.log(95.0 - predicted[:, 0]) + 0 * labels[:, 0]


@quick_rows("good rows", "logarithm")
@pytest.mark.parametrize("case", ["good rows", "label", "square", "logarithm"])
def test_large_predictions_that_do_not_explain_the_loss(case):
    x, y = data(1)
    x, y = np.abs(x), np.abs(y)
    x[6, 0] = 400.0
    loss = roots_of_labels
    if case == "square":
        x[6, 0], loss = 1e25, "mse"
    elif case == "logarithm":
        loss = logarithm_of_95_minus
    else:
        y[6] = -1.0
    if case == "good rows":
        x[4, 0] = 500.0
    report = report_of(logits(), x, y, loss)
    assert not any("exponential" in cause.evidence for cause in report.causes)
    assert not any("tf.nn.softplus" in cause.advice for cause in report.causes)
