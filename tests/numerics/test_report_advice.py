"""Advice in reports: the nearest position, and nothing that does not fit."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from non_finite_reports import names, report_of
from planted_nan_models import data
from stack_marks import SLOW_ON_KERAS_2

from tfwd.numerics.bad_step_policy import repeated_failure_hint
from tfwd.numerics.bad_step_report import Cause, Report
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.likely_causes import likely_causes
from tfwd.numerics.causes.recurrent import growing_state
from tfwd.numerics.causes.softmax import all_masked
from tfwd.numerics.checked_tensors import Frame
from tfwd.numerics.diagnosis import _with_integers
from tfwd.numerics.tensor_measurements import Measurement, measure_tensor

pytestmark = SLOW_ON_KERAS_2
layers = keras.layers


def found(kind, name, values, layer="", **frame):
    values = tf.constant(values, frame.get("dtype", "float32"))
    return Measurement(Frame(kind, name, layer, **frame), measure_tensor(values).numbers())


def evidence(*all_found, given=None, is_first=True):
    return Evidence(all_found, given or {}, [], [], keras.Sequential(), "", is_first)


def test_a_number_stays_with_its_word():
    for length in range(30, 80):
        bad = found("output", "d" * length, [[np.nan, 1.0]], "Dense")
        text = str(Report(12, [bad], place="epoch 3, batch 45"))
        for whole in ("50.00 %", "step 12", "epoch 3", "batch 45"):
            assert whole in text
        assert max(map(len, text.splitlines()[:3])) <= 100


def test_what_rows_are_counted_from_is_said_once():
    bad = found("output", "d", [[np.nan, 1.0]], "Dense")
    for where, place, parts in (
        ("in row 3 of the batch", "epoch 1, batch 1", ("counted from 0", "shuffle=False")),
        ("in row 3 of the batch", "", ("counted from 0",)),
        ("everywhere", "epoch 1, batch 1", ()),
    ):
        text = str(Report(1, [bad], [Cause("a", f"It is {where}.", "b")] * 2, place=place))
        for part in ("counted from 0", "shuffle=False"):
            assert text.count(part) == (part in parts)


def test_a_gradient_begins_where_it_comes_from():
    bad = found("gradient", "first", [[np.inf, 1.0]], "Dense")
    report = Report(1, [bad._replace(frame=bad.frame._replace(source=("last",)))])
    assert report.sentence.startswith("layer 'last': backward gradient for the output of 'first'")
    assert report.where == "layer last"
    report = Report(1, [bad])
    assert report.sentence.startswith("the loss, or code after layer 'first': backward gradient")


def test_integers_of_a_batch_are_in_the_table():
    arrays = {"x[0]": np.array([[0, 7]]), "x[1]": np.ones((1, 2), "float32"), "y": np.array([True])}
    table = _with_integers([found("data", "x[1]", [[1.0, 1.0]])], arrays)
    assert [one.frame.name for one in table] == ["x[0]", "x[1]", "y"]
    assert (table[0].detail.low, table[0].detail.high, table[0].detail.summary.zeros) == (0, 7, 1)


@pytest.mark.parametrize("kind", ["GRU", "SimpleRNN"])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_recurrent_layers_are_advised_by_what_they_are(kind, activation, monkeypatch):
    values = np.ones((2, 4, 3))
    values[:, 2:] = np.inf
    bad = found("output", "rnn", values, kind, recurrent=True, has_time=True)
    activation = getattr(keras.activations, activation)
    layer = types.SimpleNamespace(name="rnn", activation=activation)
    monkeypatch.setattr("tfwd._keras.layers.all_layers", lambda model: [layer])
    (cause,) = growing_state(evidence(bad))
    relu = activation.__name__ == "relu"
    assert ('activation="relu"' in cause.evidence) == relu
    assert ('activation="tanh"' in cause.advice) == relu
    assert ("gates" in cause.advice) == ("orthogonal" in cause.advice) == (kind == "SimpleRNN")


@pytest.mark.parametrize("name", ["scores", "softmax"])
def test_a_mask_of_infinity(name):
    mask = found("output", "scores", [[-np.inf, -np.inf], [1.0, -np.inf]], "Lambda")
    after = found("output", name, [[np.nan, np.nan], [1.0, 0.0]], "Lambda")
    causes = list(all_masked(evidence(mask, after)))
    assert len(causes) == (name == "softmax")
    assert all("FiniteCheck(exclude='scores')" in cause.advice for cause in causes)


def test_rows_that_are_masked_are_told_from_others():
    """Checks rows that are masked: a mask with one value in each row tells nothing."""
    values = np.ones((3, 4))
    values[1] = np.nan
    bad = found("output", "pool", values, "Pool", origins=("x[1]",))
    mask = np.array([[1, 1, 0], [0, 0, 0], [1, 0, 0]], bool)
    (cause,) = all_masked(evidence(bad, given={"x[1]": mask}))
    assert "row 1 of the batch, and only there all elements of 'x[1]' are False" in cause.evidence
    assert not list(all_masked(evidence(bad, given={"x[1]": mask[:, 1:2] & np.ones((3, 3), bool)})))
    other = found("output", "pool", values, "Pool", origins=("x[0]",))
    assert not list(all_masked(evidence(other, given={"x[1]": mask})))


@pytest.mark.parametrize("skipped", [0, 2])
def test_why_it_is_in_vain(skipped):
    bad = Report(1, [found("output", "d", [[np.nan, 1.0]], "Dense")])
    other = Report(1, [found("output", "e", [[np.nan, 1.0]], "Dense")])
    assert ("changes no weight" in repeated_failure_hint([bad] * 3, skipped)) == bool(skipped)
    assert repeated_failure_hint([bad, other, bad], skipped) == ""


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_grew_until_it_was_infinite_has_no_odd_derivative(value):
    bad = found("gradient", "rnn", [[value, 1.0]], "GRU", source=("dense",))
    grown = [{"rnn/kernel": 1e3**i} for i in range(5)]
    causes = [cause.name for cause in likely_causes(evidence(bad)._replace(history=grown))]
    assert causes[0] == "exploding gradients"
    assert ("a function whose derivative is infinite" in causes) == np.isnan(value)


@pytest.mark.parametrize("argument", [None, "global_clipnorm", "clipnorm", "clipvalue"])
@pytest.mark.parametrize("kind", ["gradient", "output", "state"])
def test_clipping_is_not_advised_to_an_optimizer_that_clips(kind, argument):
    """The gradients grew, or a weight of 1e5 makes an output infinite, or a state grew."""
    model = keras.Sequential([layers.Input((6,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(**({argument: 1.0} if argument else {})), "mse")
    model.optimizer.iterations.assign(5)  # updates have changed the weights
    steps = np.array([[[1.0], [1e30], [np.inf]]])
    all_found = {
        "gradient": [found("gradient", "rnn", [[np.inf, 1.0]], "GRU", source=("dense",))],
        "output": [found("weight", "w", [1e5]), found("output", "dense", [[np.inf, 1.0]], "Dense")],
        "state": [found("output", "rnn", steps, "GRU", recurrent=True, has_time=True)],
    }[kind]
    grown = [{"rnn/kernel": 1e3**i} for i in range(5)] if kind == "gradient" else [{"loss": 1.0}]
    given = evidence(*all_found, is_first=False)._replace(history=grown, model=model)
    advice = likely_causes(given)[0].advice
    assert "lower the learning rate" in advice
    assert ("global_clipnorm=1.0" in advice) == ("clip" in advice) == (argument is None)


class Latent(layers.Layer):
    """A layer with a mean and a variance, whose exponential is taken."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        large = keras.initializers.Constant(100.0)
        self.logvar = layers.Dense(2, bias_initializer=large, name="logvar")
        self.mu = layers.Dense(2, name="mu")

    def build(self, shape):
        self.logvar.build(shape)
        self.mu.build(shape)
        self.built = True

    def call(self, inputs):
        variance = tf.exp(self.logvar(inputs))
        return self.mu(inputs) + variance


def test_an_exponential_is_of_the_nearest_inner_layer():
    x, y = data(1)
    model = keras.Sequential([layers.Input((6,)), Latent(name="latent"), layers.Dense(1)])
    report = report_of(model, x, y)
    assert report.first.frame.name == "latent"
    (cause,) = report.causes
    assert cause.name == "a function outside its domain"
    assert "of 'latent/logvar, output'" in cause.evidence
    assert "clip 'latent/logvar' before the exponential" in cause.advice
    assert "1/0" not in cause.advice


def test_an_overflow_of_the_first_step_is_of_no_gradient():
    x, y = data(1)
    model = keras.Sequential([layers.Input((6,)), layers.Dense(3, name="a"), layers.Dense(1)])
    for layer in model.layers:
        layer.set_weights([np.full(w.shape, 1e15) for w in layer.get_weights()])
    report = report_of(model, 1e15 * np.abs(x), y)
    assert names(report) == ["an overflow in the forward pass"]
    assert "rate" not in report.causes[0].advice
