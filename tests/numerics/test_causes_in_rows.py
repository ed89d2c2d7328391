"""Causes that are recognized by the examples in which a tensor is not finite."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from non_finite_reports import Elementwise, dense, names, report_of
from planted_nan_models import data
from stack_marks import quick_rows, rest
from tables_by_make_target import with_slow_rest

from tfwd import _keras

layers = keras.layers
ZERO_OR_DOMAIN = "0/0 or a function outside its domain"


@rest
def test_examples_that_are_the_same_throughout():
    x, y = data(2)
    x[[10, 13]] = 0.25
    inputs = layers.Input((6,))
    deviation = layers.Lambda(
        lambda v: (v - tf.reduce_mean(v, -1, True)) / tf.math.reduce_std(v, -1, True), name="scaled"
    )
    report = report_of(keras.Model(inputs, layers.Dense(1, name="last")(deviation(inputs))), x, y)
    assert report.first.frame.name == "scaled"
    assert names(report) == [ZERO_OR_DOMAIN]
    wanted = "in rows 2, 5 of the batch, and only there 'x' is constant"
    assert wanted in report.causes[0].evidence


@rest
def test_a_vector_that_is_all_zeros_is_divided_by_its_norm():
    x, y = data(2)
    x[[10, 13]] = 0.0
    inputs = layers.Input((6,))
    hidden = layers.Dense(4, use_bias=False, name="hidden")(inputs)
    unit = layers.Lambda(lambda v: v / tf.norm(v, axis=-1, keepdims=True), name="unit")(hidden)
    report = report_of(keras.Model(inputs, layers.Dense(1, name="last")(unit)), x, y)
    assert report.first.frame.name == "unit"
    assert names(report) == [ZERO_OR_DOMAIN]
    for part in ("rows 2, 5 of the batch", "all elements of 'hidden, output' are", "of 'x' are 0"):
        assert part in report.causes[0].evidence


@rest
@pytest.mark.parametrize(
    ("column", "what"), [(0.5, "is the same for all examples"), (0.0, "is 0 everywhere")]
)
def test_a_column_that_is_the_same_for_all_examples(column, what):
    x, y = data(2)
    x[:, 3] = column
    inputs = layers.Input((6,))
    scaled = layers.Lambda(
        lambda v: (v - tf.reduce_mean(v, 0)) / tf.math.reduce_std(v, 0), name="scaled"
    )
    report = report_of(keras.Model(inputs, layers.Dense(1, name="last")(scaled(inputs))), x, y)
    assert names(report) == [ZERO_OR_DOMAIN]
    wanted = f"'scaled, output' is NaN in column 3, and only there 'x, data' {what}, so its"
    assert wanted in report.causes[0].evidence
    # A column below 0 has no logarithm. The others are not negative.
    x[:] = np.abs(x)
    x[:, 3] = -1.0
    logarithm = layers.Lambda(tf.math.log1p, name="log")
    root = layers.Lambda(tf.sqrt, name="root")
    for layer in (logarithm, root):
        outputs = layers.Dense(1, name="last")(layer(inputs))
        report = report_of(keras.Model(inputs, outputs), x - (layer is logarithm), y)
        assert ZERO_OR_DOMAIN not in names(report)
    assert "all elements of column 3. There, 'x, data' is -1 for" in report.causes[0].evidence


@rest
def test_a_text_of_padding_alone():
    words = np.random.default_rng(0).integers(1, 9, (16, 5))
    words[11] = 0
    inputs = layers.Input((5,), dtype="int32")
    vectors = layers.Embedding(9, 3, name="words")(inputs)

    class Pool(layers.Layer):
        def call(self, vectors, words):
            scores = tf.where(tf.not_equal(words, 0), vectors[..., 0], -np.inf)
            return tf.einsum("bt,btd->bd", tf.nn.softmax(scores), vectors)

    outputs = layers.Dense(1, name="last")(Pool(name="pool")(vectors, inputs))
    report = report_of(keras.Model(inputs, outputs), words, np.ones((16, 1), "float32"))
    assert report.first.frame.name == "pool"
    assert names(report) == ["a softmax whose inputs are all -infinity"]
    evidence = report.causes[0].evidence
    assert "NaN in row 3 of the batch, and only there all elements of 'x' are 0" in evidence
    assert "small number" not in report.causes[0].advice
    (tokens,) = [one for one in report.found if one.frame.name == "x"]  # in the table of ranges
    assert (tokens.frame.dtype, tokens.detail.high) == ("int64", words[8:16].max())


def gaussian(y, p):
    return tf.math.log(p[:, 1:]) + tf.square((y - p[:, :1]) / p[:, 1:])


def squared_root(y, p):
    return tf.square(tf.sqrt(p[:, :1]) - y) + p[:, 1:]


@rest
@pytest.mark.parametrize(
    ("loss", "column", "what"),
    [(gaussian, 1, "is 0"), (squared_root, 0, "is negative")],
)
def test_examples_whose_loss_is_not_finite(loss, column, what):
    """Checks examples with a non-finite loss.

    Another column has zeros or negative numbers in other rows.
    """
    x, y = data(1)
    x[:, :2] = [[2, 1], [-1, 1], [1, 2], [3, 0], [-2, 1], [1, 0], [1, -1], [1, 3]]
    x[:, 1] += loss is squared_root
    x[:, 0] *= 1.0 if loss is squared_root else -1.0
    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(2, use_bias=False, kernel_initializer="identity", name="out"),
        ]
    )
    if loss is gaussian:
        model.add(layers.Lambda(lambda v: tf.stack([v[:, 0], tf.nn.relu(v[:, 1])], 1)))
    bad = np.flatnonzero(x[:, 1] <= 0 if loss is gaussian else x[:, 0] < 0)
    report = report_of(model, x, y, loss)
    assert names(report) == ["the loss function"]
    rows = ", ".join(map(str, bad))
    expected = f"values are in rows {rows} of the batch, and only there column {column} of the "
    assert f"{expected}predictions {what}." in report.causes[0].evidence


def deviance(y, p):
    """Returns the deviance of counts; in float64 NumPy's is finite unless a count is 0."""
    return 2 * tf.reduce_mean(y * tf.math.log(y / p) - (y - p), axis=-1)


@rest
def test_labels_at_which_a_loss_is_not_finite():
    x, _ = data(1)
    counts = np.array([3, 0, 1, 2, 0, 5, 1, 4], "float32")[:, None]
    report = report_of(dense(activation="softplus"), x, counts, deviance)
    wanted = "values are in rows 1, 4 of the batch, and only there the label is 0."
    assert wanted in report.causes[0].evidence


@pytest.mark.parametrize("mode", with_slow_rest(["graph", "eager"], {"eager"}))
def test_a_state_that_grows(mode):
    x = np.ones((8, 150, 2), "float32")
    grows = keras.initializers.Identity(2.0)
    rnn = layers.SimpleRNN(3, activation="relu", recurrent_initializer=grows, name="rnn")
    model = keras.Sequential([layers.Input((150, 2)), rnn, layers.Dense(1, name="last")])
    rnn.set_weights([np.ones((2, 3)), 2 * np.eye(3), np.zeros(3)])
    report = report_of(model, x, np.ones((8, 1), "float32"), run_eagerly=mode == "eager")
    # 2 (2^(t + 1) - 1) is beyond float32 from t = 126 on.
    assert report.first.frame.name == "rnn"
    assert "first at time step 127" in report.sentence or "time step 126" in report.sentence
    assert names(report)[0] == "a state that grows from step to step"
    assert 'activation="relu"' in report.causes[0].evidence


@pytest.mark.parametrize("kind", with_slow_rest(["SimpleRNN", "LSTM", "GRU"], {"SimpleRNN"}))
def test_recurrent_layers_with_a_relu(kind):
    """Checks recurrent layers, whose activation belongs to their cell and cannot be set."""
    x = np.random.default_rng(0).normal(size=(8, 4, 2)).astype("float32")
    x[3, 2, 1] = np.nan
    rnn = getattr(layers, kind)(3, activation="relu", name="rnn")
    model = keras.Sequential([layers.Input((4, 2)), rnn, layers.Dense(1, name="last")])
    report = report_of(model, x, np.ones((8, 1), "float32"))
    assert report.first.frame.name == "x"


@rest
def test_data_that_are_not_scaled():
    x, y = data(1)
    x[:, 0] = 2000.0
    inputs = layers.Input((6,))
    power = layers.Lambda(tf.exp, name="power")(inputs)
    report = report_of(keras.Model(inputs, layers.Dense(1, name="last")(power)), x, y)
    assert names(report) == ["a function outside its domain"]
    assert "'x' reaches 2e+03." in report.causes[0].evidence


class Overflowing(keras.Model):
    """A model with a custom training step: its loss is infinite, its predictions are not."""

    def __init__(self, added):
        super().__init__()
        self.dense, self.added = layers.Dense(1, name="d"), added

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = tf.reduce_mean((p - y) ** 2) + self.added(p)
        gradients = tape.gradient(
            loss, list(map(_keras.variables.tf_variable, self.trainable_variables))
        )
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@quick_rows("<lambda>0")
@pytest.mark.parametrize(
    "added", [lambda p: tf.reduce_sum(tf.exp(p + 100.0)), lambda p: tf.constant(np.inf)]
)
def test_a_loss_in_a_users_own_step(added):
    x, y = data(1)
    report = report_of(Overflowing(added), x, y, None)
    assert report.first.frame.kind == "loss"
    assert report.sentence.startswith("loss: +Inf")
    assert names(report) == ["the loss function"]


@rest
def test_a_batch_of_one():
    x, y = data(3)
    norm = layers.BatchNormalization(epsilon=0.0, name="norm")
    model = keras.Sequential([layers.Input((6,)), norm, layers.Dense(1, name="last")])
    report = report_of(model, x[:17], y[:17])
    assert report.step == 3
    assert names(report)[0] == "a variance near zero"
    assert "The batch has 1 example, so the variance of each unit is 0." in (
        report.causes[0].evidence
    )


@rest
def test_the_number_that_a_function_was_given():
    x, y = data(1)
    x = np.abs(x)
    x[5, 2] = -1.0
    inputs = layers.Input((6,))
    logs = layers.Lambda(lambda v: tf.math.log(v + 1.0), name="logs")(inputs)
    report = report_of(keras.Model(inputs, layers.Dense(1, name="last")(logs)), x, y)
    wanted = "elements are in row 5 of the batch. In column 2 of this row, 'x' is -1."
    assert wanted in report.causes[0].evidence


@rest
def test_the_prediction_for_which_a_loss_has_no_derivative():
    x, y = data(1)
    x, y = np.abs(x) + 0.5, np.abs(y)
    x[6], y[6] = 0.0, 2.5
    model = keras.Sequential(
        [layers.Input((6,)), layers.Dense(1, use_bias=False, kernel_initializer="ones", name="d")]
    )
    report = report_of(model, x, y, lambda y, p: tf.reduce_mean(tf.sqrt(p), -1))
    assert names(report) == ["a function whose derivative is infinite"]
    evidence = report.causes[0].evidence
    assert "the loss function, or code after layer 'd', has no finite derivative" in evidence
    assert "In row 6 the prediction is 0 and the label 2.5." in evidence


class OfTexts(keras.Model):
    """A model with text labels and a custom step, or with one number as prediction."""

    def __init__(self, scalar):
        super().__init__()
        self.dense, self.scalar = layers.Dense(1, name="dense"), scalar

    def call(self, x):
        predicted = self.dense(x)
        return tf.reduce_mean(predicted) if self.scalar else predicted

    def train_step(self, data):
        x, texts = data
        y = tf.strings.to_number(texts) if texts.dtype == tf.string else texts
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = tf.reduce_mean(tf.math.log(predicted - y))
        gradients = tape.gradient(loss, [_keras.variables.tf_variable(w) for w in self.weights])
        self.optimizer.apply_gradients(zip(gradients, self.weights, strict=True))
        return {"loss": loss}


@rest
@pytest.mark.parametrize("scalar", [True, False])
def test_labels_that_are_text_and_predictions_that_are_one_number(scalar):
    x, y = data(2)
    model = OfTexts(scalar)
    model(x)
    labels = 0 * y + 100.0 if scalar else tf.fill(y.shape, "100.0")
    report = report_of(model, x, labels)
    assert report.first.frame.kind == "loss"
    assert report.first.detail.summary.nan == 1


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (tf.math.log, "a function outside its domain"),
        (tf.math.reciprocal, "a function outside its domain"),
        (lambda x: tf.square(x + 300.0), "an overflow of float16"),
        (lambda x: tf.exp(x + 12.0), "an overflow of float16"),
        (lambda x: tf.exp(x / 298.0 + 14.0), "an overflow of float16"),
    ],
    ids=["log(0)", "1/0", "square", "exp", "exp of small inputs"],
)
def test_infinity_of_a_layer_in_half_precision(function, expected, policy):
    """A logarithm of 0 is no mask of -infinity, and 1/0 is no overflow."""
    if expected.endswith("float16") and policy == "float32":
        pytest.skip("finite in float32")
    x, y = data(1)
    hidden = layers.Dense(4, kernel_initializer="zeros", dtype=policy, name="hidden")
    shift = layers.Dense(4, bias_initializer=keras.initializers.Constant(298.0), dtype=policy)
    inputs = layers.Input((6,))
    made = hidden(inputs)
    if function not in (tf.math.log, tf.math.reciprocal):
        made = shift(made)
    outputs = layers.Dense(1)(Elementwise(function, name="bad", dtype=policy)(made))
    report = report_of(keras.Model(inputs, outputs), x, y)
    assert report.where == "layer bad"
    assert names(report) == [expected]


def test_rows_of_a_tensor_that_are_no_examples():
    """The layer gets the time steps of all examples as rows: example 3, step 2 is row 17."""
    x = np.random.default_rng(0).uniform(1, 2, (8, 5, 4)).astype("float32")
    x[3, 2] = [1.0, -1.0, 2.0, -2.0]
    inputs = layers.Input((5, 4))
    merged = Elementwise(lambda v: tf.reshape(v, (-1, 4)), name="merged")(inputs)
    scaled = Elementwise(lambda v: v / tf.reduce_sum(v, -1, keepdims=True), name="scaled")(merged)
    apart = Elementwise(lambda v: tf.reshape(v, (-1, 20)), name="apart")(scaled)
    report = report_of(keras.Model(inputs, layers.Dense(1)(apart)), x, np.ones((8, 1), "float32"))
    assert report.where == "layer scaled"
    assert "in row 17 of the tensor" in report.causes[0].evidence
    assert "of the batch" not in report.causes[0].evidence
