"""Each cause of `docs/non_finite.md` is provoked, and the report must name it."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from diagnoses import dense, names, report_of
from planting import data
from stacks import IS_KERAS_2, SOAK_ON_KERAS_2, extended

import tfwd
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
        "labels 7 in row 5 of the batch, and the model has 4 classes" in report.causes[0].evidence
    )


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


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.5])
def test_learning_rate(value):
    x, y = data(4)
    report = report_of(dense(), x, y, optimizer=keras.optimizers.SGD(Breaking(value)))
    assert report.step == 3
    assert names(report)[0] == "a learning rate that is not finite or negative"
    assert report.first.frame.kind == "learning rate"


@pytest.mark.slow
def test_blow_up():
    x, y = data(60)
    model = dense(layers.Dense(4, name="middle"), layers.Dense(1, name="last"), units=4)
    model.get_layer("middle").kernel_initializer = "ones"
    report = report_of(model, x, y, optimizer=keras.optimizers.SGD(0.9))
    assert names(report)[0] == "gradients that blow up"
    growth = float(re.search(r"by a factor of ([\d.e+]+) per step", report.causes[0].evidence)[1])
    assert growth > 2


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


@pytest.mark.parametrize("kind", ADDED)
def test_losses_that_layers_add(kind):
    """Checks that the loss function is not blamed, because it is finite."""
    x, y = data(2)
    report = report_of(ADDED[kind](), x, y)
    value = "-Inf" if kind == "regularizer" else "NaN"
    assert report.sentence.startswith(f"loss that layer 'adds' adds: {value}, step 1")
    assert names(report) == ["a loss that a layer adds"]
    assert report.where == "layer adds"


@pytest.mark.slow
def test_targets_that_are_no_distributions():
    x, _ = data(2)
    y = np.eye(3, dtype="float32")[np.arange(16) % 3] - 0.5

    def loss(y, p):
        return tf.reduce_sum(y * tf.math.log(y), -1) + tf.reduce_sum(p * p, -1)

    report = report_of(dense(units=3, activation="softmax"), x, y, loss)
    assert names(report) == ["the loss function"]
    assert "'y' are not distributions" in report.causes[0].evidence


@pytest.mark.slow
def test_absent_class():
    x, _ = data(2)
    y = np.eye(3, dtype="float32")[np.arange(16) % 2]  # never class 2

    def balanced(y, p):
        return tf.reduce_mean(tf.reduce_sum(y * p, 0) / tf.reduce_sum(y, 0))

    report = report_of(dense(units=3, activation="softmax"), x, y, balanced)
    assert names(report) == ["the loss function"]
    assert "class 2 is absent in the batch" in report.causes[0].evidence


def test_float16():
    x, y = data(2)
    x *= 3000
    policy = keras.mixed_precision.Policy if IS_KERAS_2 else keras.DTypePolicy
    half = policy("mixed_float16")
    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(4, dtype=half, name="small", kernel_initializer="ones"),
            layers.Dense(4, dtype=half, name="large", kernel_initializer="ones"),
            layers.Dense(1, dtype="float32"),
        ]
    )
    model.get_layer("small").kernel_initializer = model.get_layer("large").kernel_initializer = (
        "ones"
    )
    report = report_of(model, np.abs(x), y)
    assert names(report)[0] == "an overflow of float16"
    assert report.first.frame.dtype == "float16"


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
    assert "nothing is left to divide by" in names(report)
    assert "'sample_weight' is 0 for all 8 examples" in str([c.evidence for c in report.causes])


class Normalize(layers.Layer):
    """A layer that divides rows by their sum."""

    def call(self, inputs):
        return inputs / tf.reduce_sum(inputs, -1, keepdims=True)


def on_zeros(layer, name):
    """Returns a model in which the layer gets zeros from a layer of this name."""
    zeros = layers.Dense(4, kernel_initializer="zeros", name=name)
    return keras.Sequential([layers.Input((6,)), zeros, layer, layers.Dense(1)])


def test_nothing_left_of_a_layer():
    x, y = data(2)
    report = report_of(on_zeros(Normalize(name="divided"), "gone"), x, y)
    assert report.first.frame.name == "divided"
    assert names(report)[0] == "nothing is left to divide by"
    assert "'gone, output' are 0" in report.causes[0].evidence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "value", "kind"),
    [
        (tf.sqrt, -2.0, "NaN"),
        pytest.param(tf.math.reciprocal, 0.0, "infinity", marks=pytest.mark.slow),
        (lambda values: tf.exp(20 * values), 7.0, "infinity"),
    ],
)
def test_a_function_outside_its_domain(function, value, kind):
    x, y = np.full((8, 6), 0.5, "float32"), np.ones((8, 1), "float32")
    x[:, 1] = 1.0
    x[3, 2] = value
    inputs = layers.Input((6,))
    kernel = keras.initializers.Identity()
    hidden = layers.Dense(6, kernel_initializer=kernel, name="given")(inputs)
    outputs = layers.Dense(1, name="last")(layers.Lambda(function, name="odd")(hidden))
    report = report_of(keras.Model(inputs, outputs), x, y)
    assert report.first.frame.name == "odd"
    assert names(report) == ["a function outside its domain"]
    evidence = report.causes[0].evidence
    low, high = min(value, 0.5), max(value, 1.0)
    assert f"'odd' makes {kind} of finite numbers: of 'given, output', {low:g} to {high:g}" in (
        evidence
    )
    assert "in row 3 of the batch" in evidence


@pytest.mark.slow
def test_labels_that_are_too_large():
    x, y = data(2)
    report = report_of(dense(), x, y * 1e25)
    assert names(report) == ["the loss function"]
    assert "whose square is infinite" in report.causes[0].evidence
    assert "logarithm" not in report.causes[0].evidence


@pytest.mark.slow
def test_a_mean_of_nothing():
    x, y = data(2)

    def positive(labels, predictions):
        return tf.reduce_mean(tf.boolean_mask((predictions - labels) ** 2, labels > 99.0))

    (cause,) = report_of(dense(), abs(x), y, positive).causes
    assert "a mean or a norm of nothing" in cause.advice


@pytest.mark.slow
def test_the_layer_that_a_gradient_comes_from():
    x, y = data(2)
    x[9] = 0.0
    inputs = layers.Input((6,))
    hidden = layers.Dense(3, use_bias=False, name="dense")(inputs)
    norm = layers.Lambda(lambda v: tf.sqrt(tf.reduce_sum(v * v, -1, True)), name="norm")(hidden)
    report = report_of(keras.Model(inputs, layers.Dense(1, name="last")(norm)), x, y)
    assert report.sentence.startswith(
        "layer 'norm': backward gradient for the output of 'dense' has 12.50 %"
    )
    (cause,) = report.causes
    assert (
        "that 'norm' gives back to 'dense' is not. 'norm, output' has 1 zero. It is in row 1"
        in (cause.evidence.replace("'dense, output' has 3 zeros. ", ""))
    )


@pytest.mark.slow
def test_normalization():
    x, y = np.ones((16, 6), "float32"), np.ones((16, 1), "float32")
    model = keras.Sequential(
        [layers.Input((6,)), layers.BatchNormalization(epsilon=0.0, name="norm"), layers.Dense(1)]
    )
    report = report_of(model, x, y)
    assert report.first.frame.name == "norm"
    assert names(report)[0] == "a variance near zero"
    assert "epsilon = 0.0. Its input is 1 everywhere." in report.causes[0].evidence


def test_weights():
    x, y = data(2)
    model = dense()
    kernel = model.get_layer("dense").get_weights()[0]
    kernel[2] = np.nan
    model.get_layer("dense").set_weights([kernel, np.zeros(1)])
    report = report_of(model, x, y)
    assert names(report) == ["weights that are not finite already"]
    assert "dense/kernel' are not finite before the step" in report.causes[0].evidence
    assert "from a file or an initializer" in report.causes[0].evidence


class Length(layers.Layer):
    """A layer that returns the length of each row. Its derivative is 0/0 for a row of zeros."""

    def call(self, inputs):
        return tf.sqrt(tf.reduce_sum(inputs**2, -1, keepdims=True))


def test_infinite_derivative():
    x, y = data(2)
    report = report_of(on_zeros(Length(name="length"), "before"), x, y)
    assert report.first.frame.kind == "gradient"
    assert report.first.frame.name == "before"
    assert names(report)[0] == "a function whose derivative is infinite"
    assert "'before, output' has 32 zeros" in report.causes[0].evidence


@pytest.mark.slow
def test_update():
    x, y = np.ones((8, 6), "float32"), np.ones((8, 1), "float32")
    report = report_of(dense(), x, y, optimizer=keras.optimizers.SGD(3e38))
    assert names(report) == ["an update out of range"]
    assert report.first.frame.kind == "update"


class Random(layers.Layer):
    """A layer that makes NaN without a visible cause."""

    def call(self, inputs):
        return tf.math.acosh(tf.tanh(inputs) / 2)


def test_no_cause_is_made_up():
    x, y = data(2)
    report = report_of(
        keras.Sequential([layers.Input((6,)), Random(name="r"), layers.Dense(1)]), x, y
    )
    assert names(report) == ["a function outside its domain"]
    assert "'r' makes NaN of finite numbers: of 'x, data'" in report.causes[0].evidence
    assert report.first.frame.name == "r"
    report.causes = []
    assert "No cause of docs/non_finite.md fits these observations" in str(report)


class After(keras.Model):
    """A model that computes something behind its last layer."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last = layers.Dense(4, name="first"), layers.Dense(1, name="last")
        self.between = between

    def call(self, inputs):
        hidden = self.first(inputs)
        if self.between:
            return self.last(tf.sqrt(hidden - 1e3))
        return tf.sqrt(self.last(hidden) - 1e3)


@pytest.mark.slow
@pytest.mark.parametrize("between", [True, False])
def test_what_a_model_computes_between_its_layers(between):
    x, y = data(2)
    (cause,) = report_of(After(between), x, y).causes
    assert cause.name == "a function outside its domain"
    where = "between 'first, output' and 'last, input'" if between else "after its last layer"
    assert where in cause.evidence


def test_each_cause_has_a_section():
    from tfwd.numerics.causes import likely_causes

    files = Path(likely_causes.__file__).parent.glob("*.py")
    source = "".join(path.read_text("utf-8") for path in files)
    titles = set(re.findall(r'Cause\(\s*f?"([^"]+)"', source))
    assert len(titles) > 10
    page = Path(tfwd.__file__).resolve().parents[1] / "docs" / "non_finite.md"
    sections = set(re.findall(r"^## (.+)$", page.read_text("utf-8"), re.M))
    wanted = {title.replace("{what}", "input or the labels") for title in titles}
    assert {title[0].upper() + title[1:] for title in wanted} <= sections
