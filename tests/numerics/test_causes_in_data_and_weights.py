"""Causes in the batch, the weights and the learning rate: the report must name them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from non_finite_reports import dense, names, report_of
from planted_nan_models import data
from stack_marks import IS_KERAS_2, SOAK_ON_KERAS_2, extended, quick_rows

from tfwd.layers import transformer as T

pytestmark = SOAK_ON_KERAS_2
layers = keras.layers


def test_input():
    x, y = data(2)
    x[9, 2] = x[11, 4] = np.nan
    (cause,) = report_of(dense(), x, y).causes
    assert cause.name == "NaN or infinity in the input"
    assert "rows 1, 3 of the batch, columns 2, 4" in cause.evidence


def test_labels():
    x, y = data(2)
    y[3] = np.inf
    (cause,) = report_of(dense(), x, y).causes
    assert cause.name == "NaN or infinity in the labels"
    assert "row 3 of the batch" in cause.evidence


@pytest.mark.slow
def test_label_out_of_range():
    """Checks a label out of range under XLA, where it makes NaN.

    Without XLA TensorFlow refuses it on a CPU.
    """
    x, _ = data(2)
    y = np.arange(16) % 4
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    y[5] = 7
    report = report_of(dense(units=4), x, y, loss, jit_compile=True)
    assert names(report) == ["a label out of range"]
    assert (
        "the label 7 in row 5 of the batch, and the model has 4 classes"
        in report.causes[0].evidence
    )


def sparse_in_pairs(y, p):
    """Returns a custom loss that allows each label."""
    return tf.reduce_mean(tf.square(p), -1)


@pytest.mark.parametrize(
    "loss",
    [
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1),
        sparse_in_pairs,
    ],
)
def test_labels_that_the_loss_allows(loss):
    """The root makes NaN, and not the label -1."""
    y = np.array([0, 1, 2, -1, 3, 0, 1, 2])
    root = layers.Lambda(lambda v: tf.sqrt(-1.0 - tf.abs(v)), name="root")
    report = report_of(dense(root, units=4), data(1)[0], y, loss)
    assert report.first.frame.name == "root"
    assert names(report) == ["a function outside its domain"]


def embedded(length):
    ids = keras.Input((length,), dtype="int32")
    hidden = T.Embeddings(9, 4, max_length=6, name="embeddings")(ids)
    return keras.Model(ids, layers.Dense(1)(hidden[:, 0]))


@extended
def test_id_outside_the_vocabulary():
    """Under XLA, which drops the layer's error; the report says what the error would say."""
    ids = np.arange(48).reshape(16, 3) % 9
    ids[11, 2], ids[13, 0] = 9, -1
    report = report_of(embedded(3), ids.astype("int32"), np.zeros((16, 1)), jit_compile=True)
    assert report.step == 2
    assert report.sentence.startswith(
        "layer 'embeddings': ids must be from 0 to 8; 9 is in row 3 of the batch, position 2, and "
        "1 more, step 2"
    )
    assert names(report) == ["an argument that a layer refuses"]
    assert report.where == "layer embeddings"


@pytest.mark.extended
def test_mask_that_is_additive():
    states, mask = keras.Input((3, 4)), keras.Input((3,))
    hidden = T.SelfAttention(2, 2, 4, name="attention")(states, mask=mask)
    model = keras.Model([states, mask], layers.Dense(1)(hidden[:, 0]))
    masks = np.zeros((8, 3), "float32")
    masks[4, 1] = -10000.0
    x = [np.ones((8, 3, 4), "float32"), masks]
    report = report_of(model, x, np.zeros((8, 1)), jit_compile=True)
    assert report.sentence.startswith("layer 'attention': mask must be boolean, or zeros and")
    assert "-10000 is in row 4 of the batch, position 1, step 1" in report.sentence
    assert names(report) == ["an argument that a layer refuses"]


class Breaking(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that divides by zero in its third step."""

    def __init__(self, value):
        self.value = value

    def __call__(self, step):
        return tf.where(tf.cast(step, tf.int32) == 2, self.value, 0.01)

    def get_config(self):
        return {"value": self.value}


@quick_rows("nan", "-0.5")
@pytest.mark.parametrize("value", [np.nan, np.inf, -0.5])
def test_learning_rate(value):
    x, y = data(4)
    report = report_of(dense(), x, y, optimizer=keras.optimizers.SGD(Breaking(value)))
    assert report.step == 3
    assert names(report)[0] == "a learning rate that is not finite or negative"
    assert report.first.frame.kind == "learning rate"


@pytest.mark.skipif(IS_KERAS_2, reason="Keras 2 does not accumulate gradients")
def test_the_iterations_that_a_schedule_gets():
    """The schedule gets 0, 1 and 2 in the first three steps. Only one update was made before."""
    x, y = data(4)
    optimizer = keras.optimizers.SGD(Breaking(np.nan), gradient_accumulation_steps=2)
    report = report_of(dense(), x, y, optimizer=optimizer)
    assert report.step == 3
    assert "for iterations = 2." in report.causes[0].evidence


def products(y, p):
    return tf.reduce_mean(y * p * 1e3, -1)


LARGE_LABELS = {
    "mse": ("mse", "whose square is infinite"),
    "MeanSquaredError": (keras.losses.MeanSquaredError(), "whose square is infinite"),
    "product": (products, "and a square or a product of such a number may be infinite"),
}


@quick_rows("mse", "product")
@pytest.mark.parametrize("loss", LARGE_LABELS)
def test_labels_that_are_too_large(loss):
    """Only Keras's own losses are known to square the labels."""
    x, y = data(2)
    loss, text = LARGE_LABELS[loss]
    report = report_of(dense(), x, np.clip(y, 1, 2) * 1e37, loss)
    assert names(report) == ["the loss function"]
    (cause,) = report.causes
    assert text in cause.evidence
    assert ("square is infinite" in cause.evidence) == (loss is not products)
    assert "logarithm" not in cause.evidence
    assert "scale the labels" in cause.advice
    assert "divisor" not in cause.advice


def test_labels_whose_squares_add_up_to_infinity():
    x, y = data(2)
    labels = np.full_like(y, 1.5e19)
    assert np.isfinite(labels[0] ** 2).all()
    (cause,) = report_of(dense(), x, labels).causes
    assert "'y' reaches 1.5e+19, and a sum of such squares is infinite" in cause.evidence


def test_weights():
    x, y = data(2)
    model = dense()
    kernel = model.get_layer("dense").get_weights()[0]
    kernel[2] = np.nan
    model.get_layer("dense").set_weights([kernel, np.zeros(1)])
    report = report_of(model, x, y)
    assert names(report) == ["weights that are not finite already"]
    assert "dense/kernel' is not finite before the step" in report.causes[0].evidence
    assert "from a file or an initializer" in report.causes[0].evidence
