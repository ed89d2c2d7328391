"""`FiniteCheck` in each mode: its findings, its actions, and the state that it must not change."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from finite_check_fits import BAD, MODES, fit, make, same
from planted_nan_models import TRIGGERS, VALUES, Plant, counts, data, state
from replicas import two_replicas
from stack_marks import IS_KERAS_2, quick_rows
from tables_by_make_target import with_slow_rest

import tfwd
from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError


def planted_model(value=None, direction="forward", mode="graph", place=(3, 2)):
    """Returns a model with a plant right behind the input, which the trigger reaches, or deeper."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    options, scope = {"jit_compile": False}, contextlib.nullcontext()
    accumulated = {"gradient_accumulation_steps": 3} if mode == "accumulation" else {}
    if mode in MODES:
        options = MODES[mode]
    elif mode == "two replicas":
        scope = two_replicas().scope()
    elif mode == "mixed_float16":
        keras.config.set_dtype_policy(mode)
    with scope:
        optimizer = keras.optimizers.Adam(**accumulated)
        if mode == "mixed_float16":
            scaled = (keras.mixed_precision if IS_KERAS_2 else keras.optimizers).LossScaleOptimizer
            optimizer = scaled(optimizer, initial_scale=1.0)
        inputs = keras.Input((6,))
        encoder = keras.Sequential(
            [
                layers.Input((6,)),
                layers.Dense(6, name="first", kernel_initializer="identity"),
                Plant(value, direction, place, name="plant"),
                layers.Dense(4, activation="relu", name="second"),
            ],
            name="encoder",
        )
        # Its gradients are so small that all other values fit into float16.
        small = keras.initializers.RandomNormal(stddev=1e-4)
        last = layers.Dense(1, kernel_initializer=small, dtype="float32", name="last")
        model = keras.Model(inputs, last(encoder(inputs)))
        model.compile(optimizer, "mse", **options)
    return model


OTHERS = ["two replicas", "mixed_float16", *([] if IS_KERAS_2 else ["accumulation"])]
SOAKED = {"backward, eager", "forward, two replicas", "backward, four steps an execution"}
PLANTED = [f"{way}, {m}" for way in ("forward", "backward") for m in (*MODES, *OTHERS)]


@pytest.mark.parametrize("case", with_slow_rest(PLANTED, {"backward, graph"}, SOAKED))
def test_planted_numbers_are_found(case):
    direction, mode = case.split(", ")
    model = planted_model(None, direction, mode)
    x, y = data(7)
    for i, trigger in enumerate(TRIGGERS.values()):
        x[8 * (2 * i + 1) + 3, 0] = trigger
    check = FiniteCheck("skip")
    with pytest.warns(UserWarning, match="skipped"):
        fit(model, x, y, check)
    assert [report.step for report in check.reports] == [2, 4, 6]
    for report, value in zip(check.reports, TRIGGERS, strict=True):
        first = report.first
        summary = first.detail.summary
        assert (summary.nan, summary.positive_inf, summary.negative_inf) == counts(VALUES[value])
        assert summary.size == (24 if mode == "two replicas" else 48)
        if direction == "forward":
            assert (first.frame.kind, first.frame.name) == ("output", "encoder/plant")
            assert first.frame.layer == "Plant"
        else:  # the plant returns the gradient of the layer before it
            assert (first.frame.kind, first.frame.name) == ("gradient", "encoder/first")
        assert f"of {summary.size}), step {report.step}" in report.sentence


@quick_rows("graph")
@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph", "eager"}))
def test_finite_training_is_the_same_to_the_bit(mode):
    x, y = data(5)
    # (Otherwise the draws of Keras 2's Dropout depend on more than its seed.)
    draws = mode == "graph"
    plain, checked = make(mode=mode, draws=draws), make(mode=mode, draws=draws)
    keras.utils.set_random_seed(4)
    fit(plain, x, y, epochs=2)
    keras.utils.set_random_seed(4)
    history = fit(checked, x, y, FiniteCheck(), epochs=2)
    same(state(checked), state(plain), mode)
    same(history.history["loss"], plain.history.history["loss"], mode)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "stop"}, "action='stop': give one of 'raise', 'skip', 'restore'"),
        ({"every_n_steps": 0}, "every_n_steps=0: give a whole number of at least 1"),
        ({"history": -1}, "history=-1: give a whole number of at least 0"),
        ({"max_consecutive": 1.5}, "max_consecutive=1.5: give a whole number of at least 0"),
        ({"factor": 2.0}, "factor=2.0: give a number above 0, and at most 1"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message.replace("(", "\\(")):
        FiniteCheck(**arguments)


def test_the_input_that_relu_swallows():
    """Checks an input that oneDNN's relu hides: it makes 0 of NaN in a graph."""
    x, y = data(4)
    x[8 * BAD + 1, 4] = np.nan
    model = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(5, activation="relu", name="first"),
            keras.layers.Dense(1, name="last"),
        ]
    )
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(NonFiniteError) as caught:
        fit(model, x, y, FiniteCheck())
    report = caught.value.report
    assert report.first.frame.name == "x"
    assert [one.frame.kind for one in report.offenders[:2]] == ["data", "pre-activation"]
    assert "row 1 of the batch, column 4" in report.causes[0].evidence


@pytest.mark.parametrize("return_sequences", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", with_slow_rest(["LSTM", "GRU", "SimpleRNN"], {"LSTM"}))
def test_the_first_time_step_is_named(kind, return_sequences):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 7, 3)).astype("float32")
    x[2, 4, 1] = 3e38
    layers = keras.layers
    activation = {"activation": "linear", "recurrent_activation": "linear"}
    if kind == "SimpleRNN":
        activation.pop("recurrent_activation")
    model = keras.Sequential(
        [
            layers.Input((7, 3)),
            getattr(layers, kind)(4, return_sequences=return_sequences, name="rnn", **activation),
            layers.GlobalMaxPooling1D() if return_sequences else layers.Flatten(),
            layers.Dense(1),
        ]
    )
    # A product of two gates of the step overflows, or the sum of a simple layer.
    factor = 100.0 if kind == "SimpleRNN" else 0.1
    kernel, *others = model.get_layer("rnn").get_weights()
    model.get_layer("rnn").set_weights([factor * kernel, *(0.1 * w for w in others)])
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(NonFiniteError) as caught:
        fit(model, x, np.ones((8, 1)), FiniteCheck())
    assert caught.value.report.first.frame.name == "rnn"
    assert "first at time step 4" in caught.value.report.sentence


def test_weights_that_no_gradient_reaches():
    inputs = keras.Input((6,))
    first = keras.layers.Dense(2, name="used")
    outputs = first(inputs)
    model = keras.Model(inputs, [outputs, keras.layers.Dense(1, name="unused")(outputs)])
    model.compile("sgd", ["mse", None])
    x, y = data(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, x, y, FiniteCheck(), epochs=2)
    ours = [str(w.message) for w in caught if str(w.message).startswith("FiniteCheck")]
    assert len(ours) == 1
    assert "unused/kernel, unused/bias" in ours[0]


@pytest.mark.slow
@pytest.mark.parametrize("order", [0, 1])
def test_beside_gradient_squared_mean(order):
    x, y = data(4)
    model = make()
    model.get_layer("norm").trainable = False
    moments, check = tfwd.callbacks.GradientSquaredMean(every_n_steps=2), FiniteCheck("skip")
    x[8 * BAD + 8, 0] = np.nan  # in batch 3, which is not measured
    with pytest.warns(UserWarning, match="skipped"):
        fit(model, x, y, *[moments, check][:: 1 - 2 * order])
    assert [record["step"] for record in moments.records] == [0, 2]
    assert check.skipped == 1
    fit(model, x[:16], y[:16])


def test_the_report_fits_a_terminal_and_json():
    import json

    x, y = data(4, BAD)
    with pytest.raises(NonFiniteError) as caught:
        fit(planted_model(np.nan, "forward", "graph"), x, y, FiniteCheck(history=3))
    report = caught.value.report
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("layer 'encoder/plant': forward output has 2.08 % non-finite")
    json.dumps(report.to_dict())
    table = lines[lines.index("") + 2 :]
    names = ["x, data", "y, data", "..."]
    assert [line.endswith(name) for line, name in zip(table, names, strict=False)] == [True] * 3
    assert table[6].endswith("encoder/plant, output")


def test_excluded_layers():
    inputs = keras.layers.Input((6,))
    masked = keras.layers.Lambda(lambda v: tf.where(v > 0, v, -np.inf), name="masked")(inputs)
    outputs = keras.layers.Dense(1)(keras.layers.Softmax(name="shares")(masked))
    x, y = data(3)
    x[:, 0] = 1.0
    for exclude, raises in ((None, True), ("shares", True), (["shares", "masked"], False)):
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse", jit_compile=False)
        if raises:
            with pytest.raises(NonFiniteError, match="layer 'masked': forward output"):
                fit(model, x, y, FiniteCheck(exclude=exclude))
        else:
            fit(model, x, y, FiniteCheck(exclude=exclude))
    with pytest.raises(ValueError, match="is not a regular expression"):
        FiniteCheck(exclude="(")
    with pytest.raises(ValueError, match="exclude='maks' matches no layer and no weight of model"):
        fit(model, x, y, FiniteCheck(exclude=["masked", "maks"]))
