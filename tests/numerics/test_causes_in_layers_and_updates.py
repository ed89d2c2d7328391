"""Causes in layers, gradients and updates, and the sections of `docs/non_finite.md`."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from non_finite_reports import dense, names, report_of
from planted_nan_models import data
from stack_marks import IS_KERAS_2, SOAK_ON_KERAS_2

pytestmark = SOAK_ON_KERAS_2
layers = keras.layers


@pytest.mark.slow
def test_blow_up():
    x, y = data(60)
    model = dense(layers.Dense(4, name="middle"), layers.Dense(1, name="last"), units=4)
    model.get_layer("middle").kernel_initializer = "ones"
    report = report_of(model, x, y, optimizer=keras.optimizers.SGD(0.9))
    assert names(report)[0] == "exploding gradients"
    growth = float(re.search(r"by a factor of ([\d.e+]+) per step", report.causes[0].evidence)[1])
    assert growth > 2


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
    assert names(report)[0] == "0/0 or a function outside its domain"
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
    assert f"'odd' makes {kind} from finite numbers." in evidence
    assert f"The values of 'given, output' are from {low:g} to {high:g}" in evidence
    assert "in row 3 of the batch" in evidence


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
        "that 'norm' returns to 'dense' is not. 'norm, output' has 1 zero. The non-finite elements "
        "are in row 1" in (cause.evidence.replace("'dense, output' has 3 zeros. ", ""))
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


def submodel(layer, shape, name):
    inputs = layers.Input(shape)
    return keras.Model(inputs, layer(inputs), name=name)


def test_two_normalizations_of_the_same_name():
    """The input of the second one is constant, and only its epsilon is 0."""
    x, y = data(2)
    first, second = (layers.LayerNormalization(epsilon=e, name="norm") for e in (1e-3, 0.0))
    inputs = layers.Input((6,))
    hidden = submodel(first, (6,), "encoder")(inputs)
    hidden = layers.Dense(3, kernel_initializer="zeros", name="zeros")(hidden)
    hidden = submodel(second, (3,), "decoder")(hidden)
    report = report_of(keras.Model(inputs, layers.Dense(1)(hidden)), x, y)
    assert report.first.frame.name == "decoder/norm"
    said = {cause.name: cause.evidence for cause in report.causes}["a variance near zero"]
    assert "plus epsilon = 0.0." in said


def test_two_recurrent_layers_of_the_same_name():
    """The first one uses tanh: its outputs are 1. The state of the second one is exp(1 + state).

    The states are 2.7, 41 and 2e18, and then infinity.
    """
    x, y = np.full((8, 9, 1), 1e3, "float32"), np.ones((8, 1), "float32")
    ones = {"kernel_initializer": "ones", "recurrent_initializer": "ones", "name": "rnn"}
    bounded = layers.SimpleRNN(1, return_sequences=True, **ones)
    unbounded = layers.SimpleRNN(1, activation=tf.exp, **ones)
    inputs = layers.Input((9, 1))
    hidden = submodel(bounded, (9, 1), "encoder")(inputs)
    hidden = submodel(unbounded, (9, 1), "decoder")(hidden)
    report = report_of(keras.Model(inputs, layers.Dense(1)(hidden)), x, y)
    assert report.first.frame.name == "decoder/rnn"
    assert 'Its activation="exp" is unbounded' in report.causes[0].evidence


@pytest.mark.parametrize("follows", [False, True])
def test_a_gradient_through_a_normalization(follows):
    """Checks that the layer is blamed for its own gradient, not for the gradient that it gets."""
    x, y = np.full((8, 6), 0.5, "float32"), np.ones((8, 1), "float32")
    norm = layers.LayerNormalization(epsilon=1e-3 if follows else 0.0, name="norm")
    # The variance is about 2e-37. The output is about 1, and the gradient exceeds float32.
    start = [[0.0, 1e-18, 2e-18]] + [[0.0] * 3] * 5
    kernel = layers.Dense(3, use_bias=False, name="dense")
    kernel.build((None, 6))
    kernel.set_weights([np.array(start, "float32")])
    hidden = norm(kernel(inputs := layers.Input((6,))))
    if follows:
        hidden = layers.Lambda(lambda v: tf.sqrt(tf.nn.relu(-tf.abs(v))), name="odd")(hidden)
    last = layers.Dense(1, kernel_initializer=keras.initializers.Constant(1e5), name="last")
    report = report_of(keras.Model(inputs, last(hidden[:, :1])), x, y)
    assert report.first.frame.kind == "gradient"
    assert report.first.frame.name == ("norm" if follows else "dense")
    assert ("a variance near zero" in names(report)) == (not follows)
    if not follows:
        assert (
            "the gradient that 'norm' returns. 'norm' is a LayerNorm" in report.causes[0].evidence
        )


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
    assert (
        "'r' makes NaN from finite numbers. The values of 'x, data' are"
        in report.causes[0].evidence
    )
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
    page = Path(__file__).resolve().parents[2] / "docs" / "non_finite.md"
    sections = set(re.findall(r"^## (.+)$", page.read_text("utf-8"), re.M))
    wanted = {title.replace("{what}", "input or the labels") for title in titles}
    assert {title[0].upper() + title[1:] for title in wanted} <= sections
