"""Causes in custom layers, where the function decides and not the special values of its input.

The oracle is the function in NumPy: it says which elements are NaN or infinite, and why.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from non_finite_reports import Elementwise, names, report_of

layers = keras.layers
DOMAIN, ZERO = "a function outside its domain", "a division of 0 by 0"
ZERO_OR_DOMAIN, GROWS = f"0/0 or {DOMAIN}", "a state that grows from step to step"


def report_on(function, x):
    """Returns the report on a layer that calls a function of the inputs."""
    layer = Elementwise(function, name="own")
    outputs = layers.Dense(1)(layers.Flatten()(layer(inputs := keras.Input(x.shape[1:]))))
    return report_of(keras.Model(inputs, outputs), x, np.ones((8, 1), "float32"))


def quotient(x):
    return tf.exp(x) / tf.reduce_sum(tf.exp(x), -1, keepdims=True)


def difference(x):
    return tf.exp(x) - tf.exp(x + 1)


def scaled(x):
    spread = tf.math.reduce_std(x, -1, keepdims=True)
    return (x - tf.reduce_mean(x, -1, keepdims=True)) / spread


@pytest.mark.parametrize("shape", [(3,), (4, 3)], ids=["rows", "vectors"])
@pytest.mark.parametrize(
    ("function", "value", "cause"),
    [
        (tf.sqrt, -2, DOMAIN),
        (tf.math.log, -2, DOMAIN),
        (quotient, 200, DOMAIN),
        (difference, 200, DOMAIN),
        (lambda x: tf.acos(x / 3.1), 4, DOMAIN),
        (lambda x: tf.math.log(3.1 - x), 4, DOMAIN),
        (scaled, 2, ZERO_OR_DOMAIN),
    ],
)
def test_elements_that_are_equal(function, value, cause, shape):
    """Checks that equal elements are called 0/0 only if their sign and size explain nothing."""
    x = np.random.default_rng(0).uniform(0.1, 3, (8, *shape)).astype("float32")
    x[(2, *(1,) * (len(shape) - 1))] = value
    assert names(report_on(function, x)) == [cause]


def test_a_negative_constant_among_negative_numbers():
    """Checks that 0/0 is found if other rows have negative elements and are finite."""
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    x[2] = -2
    assert names(report_on(scaled, x)) == [ZERO_OR_DOMAIN]


@pytest.mark.parametrize(
    ("function", "value", "seen"),
    [
        (lambda x: x + tf.acos(tf.reduce_sum(x, -1, keepdims=True) / 1.7), 0.6, "is constant"),
        (lambda x: x * tf.math.log(tf.reduce_sum(x, -1, keepdims=True)), 0, "are 0"),
        (lambda x: x + tf.sqrt(tf.reduce_sum(x**2, -1, keepdims=True) - 0.01), 0, "are 0"),
    ],
    ids=["arccosine", "0 times infinity", "root"],
)
def test_a_special_row_is_no_proof_of_a_division(function, value, seen):
    """Checks that the report says what it saw, and names 0/0 only as one possibility."""
    x = np.random.default_rng(0).uniform(0.1, 0.5, (8, 3)).astype("float32")
    x[:, 0], x[5] = 0.7, value
    (cause,) = report_on(function, x).causes
    assert cause.name == ZERO_OR_DOMAIN
    assert "is NaN in row 5 of the batch, and only there " in cause.evidence
    assert seen in cause.evidence
    for word in ("0/0", "0 times infinity", "arccosine", "logarithm"):
        assert word in cause.evidence
    assert ": 0/0" not in cause.evidence
    assert "clip the argument of its root, logarithm or arccosine" in cause.advice


def test_a_product_that_overflows():
    """Checks the cause of infinity in a product, and that its row is named."""
    x = np.random.default_rng(0).uniform(0.1, 3, (8, 3)).astype("float32")
    x[5, 1] = 4
    (cause,) = report_on(lambda x: x * 1e38, x).causes
    assert cause.name == "an overflow in the forward pass"
    assert "own' makes infinity from finite numbers" in cause.evidence
    assert "row 5 of the batch" in cause.evidence


def test_an_exponential_that_overflows():
    """Checks that an exponential is not called a product, although its results are large."""
    x = np.random.default_rng(0).uniform(80, 88, (8, 3)).astype("float32")
    x[5, 1] = 90
    (cause,) = report_on(tf.exp, x).causes
    assert cause.name == DOMAIN
    assert "+infinity comes from the exponential" in cause.advice


class Cell(layers.Layer):
    """A cell whose state is a function of its input and of the last state."""

    state_size = output_size = 2

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x, states):
        new = self.function(x[:, :2], states[0])
        return new, [new]


@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize(
    ("function", "value", "cause"),
    [
        (lambda x, state: tf.sqrt(x) + 0.1 * state, -9, DOMAIN),
        (lambda x, state: tf.math.log(x) + 0.5 * state, 0, DOMAIN),
        (lambda x, state: 1 / x + 0.5 * state, 0, DOMAIN),
        (lambda x, state: 1000 * x + tf.math.log(x) + 0.5 * state, 0, DOMAIN),
        (lambda x, state: tf.square(state) + 2, 0, GROWS),
        (lambda x, state: 1e5 * (state + 1), 0, GROWS),
        (lambda x, state: tf.exp(state) - state, 0, GROWS),
    ],
    ids=["root", "logarithm", "1/0", "large inputs", "square", "factor", "exponential"],
)
def test_a_state_in_a_custom_cell(function, value, cause, sequences):
    """Checks that a root or a logarithm in a time step is not called a state that grows."""
    x = np.random.default_rng(0).uniform(0.5, 3, (8, 9, 3)).astype("float32")
    x[:, :, 0] = 2
    x[4, 4, 0] = value
    inputs = keras.Input((9, 3))
    hidden = layers.RNN(Cell(function, name="cell"), return_sequences=sequences, name="rnn")(inputs)
    outputs = layers.Dense(1)(layers.Flatten()(hidden))
    report = report_of(keras.Model(inputs, outputs), x, np.ones((8, 1), "float32"))
    assert report.first.frame.name == "rnn"
    assert names(report) == [cause]


def test_an_activation_outside_its_domain_in_a_recurrent_layer():
    x = np.random.default_rng(0).uniform(0.5, 3, (8, 9, 1)).astype("float32")
    x[4, 4] = 0
    rnn = layers.SimpleRNN(
        1,
        tf.math.log,
        kernel_initializer="ones",
        recurrent_initializer="zeros",
        return_sequences=True,
        name="rnn",
    )
    model = keras.Sequential([keras.Input((9, 1)), rnn, layers.Flatten(), layers.Dense(1)])
    assert names(report_of(model, x, np.ones((8, 1), "float32"))) == [DOMAIN]


def test_a_vector_of_zeros_in_a_unit_normalization():
    """Checks that the cause speaks of a norm: the layer has no variance and no epsilon."""
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    x[4] = 0
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(3, name="d"), layers.UnitNormalization(name="u")]
    )
    try:
        report = report_of(model, x, np.ones((8, 3), "float32"), jit_compile=True)
    except pytest.fail.Exception:
        pytest.skip("this build of XLA returns 0 for a vector of zeros")
    assert report.causes[0].name == ZERO
    assert "the norm of each vector" in report.causes[0].evidence
    assert all("epsilon" not in cause.evidence for cause in report.causes)


@pytest.mark.parametrize("hidden", [None, layers.Dense, layers.SimpleRNN])
def test_a_mean_of_padding_alone(hidden):
    """Checks a text of padding in Keras's own layers: its mean is 0/0, and no softmax is there."""
    words = np.random.default_rng(0).integers(1, 9, (8, 5)).astype("int32")
    words[3] = 0
    inputs = keras.Input((5,), dtype="int32")
    vectors = layers.Embedding(9, 4, mask_zero=True, name="words")(inputs)
    if hidden is not None:
        options = {} if hidden is layers.Dense else {"return_sequences": True}
        vectors = hidden(4, name="hidden", **options)(vectors)
    outputs = layers.Dense(1, name="last")(layers.GlobalAveragePooling1D(name="mean")(vectors))
    report = report_of(keras.Model(inputs, outputs), words, np.ones((8, 1), "float32"))
    assert report.first.frame.name == "mean"
    assert names(report) == [ZERO]
    assert "row 3 of the batch" in report.causes[0].evidence


def dice(y, p):
    return 1 - 2 * tf.reduce_sum(y * p, -1) / (tf.reduce_sum(y, -1) + tf.reduce_sum(p, -1))


def test_a_loss_of_labels_and_predictions_that_are_0():
    """Checks a quotient of sums: the report names the zeros, not only one of its columns."""
    x = np.random.default_rng(0).uniform(0.1, 3, (8, 3)).astype("float32")
    x[4] = 0
    dense = layers.Dense(3, kernel_initializer="identity")
    report = report_of(keras.Sequential([keras.Input((3,)), dense]), x, np.sign(x), dice)
    assert "only there all labels and all predictions are 0" in report.causes[0].evidence


def test_one_time_step_that_overflows():
    """Checks that a state is not said to grow if the input of its step is enormous."""
    x = np.random.default_rng(0).normal(size=(8, 5, 3)).astype("float32")
    x[2, 3] = 1e38
    recurrent = layers.SimpleRNN(4, "relu", kernel_initializer="ones", return_sequences=True)
    model = keras.Sequential([keras.Input((5, 3)), recurrent, layers.Dense(1)])
    report = report_of(model, x, np.ones((8, 5, 1), "float32"))
    assert not any("grows" in cause.name for cause in report.causes)
    assert any("1e+38" in cause.evidence for cause in report.causes)


def test_a_constant_column_in_a_batch_normalization():
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    x[:, 1] = 2
    norm = layers.BatchNormalization(epsilon=0.0, name="norm")
    model = keras.Sequential([keras.Input((3,)), norm, layers.Dense(1)])
    (cause, *_) = report_of(model, x, np.ones((8, 1), "float32")).causes
    assert "The non-finite column is 1." in cause.evidence
