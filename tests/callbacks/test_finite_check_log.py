"""Output of `FiniteCheck`: TensorBoard's scalars, histograms and reports, and the plot."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from planted_nan_models import data
from stack_marks import SOAK_ON_KERAS_2, extended
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tfwd.callbacks import FiniteCheck
from tfwd.finite import largest
from tfwd.numerics import NonFiniteError
from tfwd.numerics.checked_tensors import Frame
from tfwd.numerics.magnitude_plot import COLUMNS, Magnitudes

pytestmark = SOAK_ON_KERAS_2
layers = keras.layers


def make(jit_compile=False):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(5, activation="relu", name="first"),
            layers.Dense(1, name="last"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit_compile)
    return model


def scalars(folder):
    """Returns the values by tag and step, and the tags of everything else."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    found, others = {}, {}
    for tag in events.Tags()["tensors"]:
        values = [(e.step, tf.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
        (found if values[0][1].ndim == 0 and values[0][1].dtype != object else others)[tag] = values
    return {tag: {step: float(v) for step, v in values} for tag, values in found.items()}, others


def fit(model, x, y, check, **kwargs):
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[check], **kwargs)


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_numbers_equal_numpy(jit_compile, tmp_path):
    model = make(jit_compile)
    x, y = data(4)
    kernel, bias, last, offset = (w.astype("float64") for w in model.get_weights())
    fit(model, x, y, FiniteCheck(log_dir=tmp_path, log_every_n_steps=3))
    found, others = scalars(tmp_path)
    assert set(found["abs_mean/output/first"]) == {1, 4}

    hidden = np.maximum(x[:8] @ kernel + bias, 0)
    output = hidden @ last + offset
    slope = 2 * (output - y[:8]) / 8
    gradient = x[:8].T @ ((slope @ last.T) * (hidden > 0))

    def at_first(tag):
        return found[tag][1]

    close = {"rtol": 1e-5}
    np.testing.assert_allclose(at_first("abs_mean/output/first"), abs(hidden).mean(), **close)
    np.testing.assert_allclose(
        at_first("zeros_percent/output/first"), 100 * (hidden == 0).mean(), **close
    )
    np.testing.assert_allclose(at_first("abs_mean/output/last"), abs(output).mean(), **close)
    np.testing.assert_allclose(at_first("abs_mean/gradient/last"), abs(slope).mean(), **close)
    paths = [tag for tag in found if tag.endswith("first/kernel")]
    (tag,) = [t for t in paths if t.startswith("abs_mean/weight")]
    np.testing.assert_allclose(at_first(tag), abs(kernel).mean(), **close)
    (tag,) = [t for t in paths if t.startswith("abs_mean/gradient")]
    np.testing.assert_allclose(at_first(tag), abs(gradient).mean(), **close)
    (tag,) = [t for t in paths if t.startswith("update_to_weight")]
    ratio = 0.1 * abs(gradient).mean() / abs(kernel).mean()
    np.testing.assert_allclose(at_first(tag), ratio, rtol=1e-4)
    assert sum(values[0][1].shape[-1:] == (3,) for values in others.values()) >= 8  # histograms


@extended
def test_training_is_the_same_to_the_bit(tmp_path):
    x, y = data(4)
    plain, logged = make(), make()
    plain.fit(x, y, batch_size=8, shuffle=False, verbose=0, epochs=2)
    check = FiniteCheck(log_dir=tmp_path / "logs", plot=tmp_path / "plot.png", log_every_n_steps=2)
    fit(logged, x, y, check, epochs=2)
    for one, other in zip(logged.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_plot_and_report(tmp_path):
    x, y = data(4)
    x[17, 2] = np.nan  # of the third batch
    check = FiniteCheck("skip", log_dir=tmp_path / "logs", plot=tmp_path / "sub" / "plot.png")
    with pytest.warns(UserWarning, match="skipped a step"):
        fit(make(), x, y, check)
    assert tf.io.decode_png((tmp_path / "sub" / "plot.png").read_bytes()).shape[2] in (3, 4)
    _, others = scalars(tmp_path / "logs")
    ((step, text),) = others["finite_check"]
    assert step == 3
    assert check.reports[0].sentence in text.item().decode()
    assert len(others["magnitudes"]) >= 1
    json.dumps(check.reports[0].to_dict())


@extended
@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_magnitudes_equal_numpy(jit_compile, tmp_path, monkeypatch):
    model = make(jit_compile)
    x, y = data(3)
    x[8, 0] = np.inf
    weights = model.get_weights()
    held = []
    monkeypatch.setattr(Magnitudes, "write_plot", lambda self, path: held.append(self))
    with pytest.raises(NonFiniteError):
        fit(model, x, y, FiniteCheck(plot=tmp_path / "plot.png"))
    magnitudes = held[-1]
    assert magnitudes.steps == [1, 2]
    first, second = magnitudes.columns
    np.testing.assert_allclose(first["x, data"], abs(x[:8]).max(), rtol=1e-6)
    before = x[:8] @ weights[0] + weights[1]
    np.testing.assert_allclose(first["first, pre-activation"], abs(before).max(), rtol=1e-5)
    assert second["x, data"] == np.inf
    assert second["y, data"] == abs(y[8:16]).max()
    assert list(first)[:2] == ["x, data", "y, data"]


def test_long_trainings_are_put_together():
    magnitudes = Magnitudes()
    for step in range(1, 1000):
        magnitudes.add(
            step, [(Frame("output", "a"), float(step % 100)), (Frame("loss", "loss"), 1.0)]
        )
    assert len(magnitudes.steps) <= COLUMNS
    for start, column in zip(magnitudes.steps, magnitudes.columns, strict=True):
        until = min(start + magnitudes._together, 1000)
        assert column["a, output"] == max(step % 100 for step in range(start, until))


def test_a_log_that_fails_does_not_end_training(tmp_path, monkeypatch):
    def full(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Magnitudes, "write_plot", full)
    model = make()
    x, y = data(2)
    with pytest.warns(UserWarning, match="stops its log, because a file cannot .*No space"):
        fit(model, x, y, FiniteCheck(plot=tmp_path / "plot.png"))
    assert np.isfinite(model.get_weights()[0]).all()


def test_errors(tmp_path):
    for log_every in (0, 1.5):
        with pytest.raises(ValueError, match="log_every_n_steps=.*whole number of at least 1"):
            FiniteCheck(log_every_n_steps=log_every)
    with pytest.raises(ValueError, match=r"plot='plot.txt': give a file that ends in .png"):
        FiniteCheck(plot="plot.txt")
    for name in ("plot", "log_dir"):
        with pytest.raises(ValueError, match=f"{name}=3: give a path"):
            FiniteCheck(**{name: 3})
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match=f"{name}='.*' cannot be written"):
            fit(make(), *data(2), FiniteCheck(**{name: tmp_path / "file" / "x.png"}))


def first_values(model, x, y, folder):
    """Returns the scalars of the first step of a training with one batch, and its updates."""
    before = model.get_weights()
    check = FiniteCheck(log_dir=folder / "logs")
    model.fit(x, y, batch_size=len(y), shuffle=False, verbose=0, callbacks=[check])
    found, _ = scalars(folder / "logs")
    updates = [a - b for a, b in zip(before, model.get_weights(), strict=True)]
    return {tag: values[1] for tag, values in found.items()}, updates


def test_the_gradient_of_an_embedding(tmp_path):
    """Checks repeated ids, whose rows an optimizer adds, against the update of plain SGD."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            layers.Input((6,), dtype="int32"),
            layers.Embedding(50, 4, name="e"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(1.0), "mse")
    ids = np.random.default_rng(0).integers(0, 3, (8, 6))
    found, updates = first_values(model, ids, np.ones((8, 1), "float32"), tmp_path)
    (tag,) = [t for t in found if t.startswith("abs_mean/gradient") and "embeddings" in t]
    np.testing.assert_allclose(found[tag], abs(updates[0]).mean(), rtol=1e-4)
    zeros = 100 * (updates[0] == 0).mean()
    np.testing.assert_allclose(found[tag.replace("abs_mean", "zeros_percent")], zeros)
    assert zeros > 90


def test_the_largest_gradient_of_an_embedding():
    slices = tf.IndexedSlices(tf.constant([[1.0], [2.0], [-5.0]]), tf.constant([4, 4, 0]), [9, 1])
    assert float(largest(slices)) == 5.0
    slices = tf.IndexedSlices(tf.constant([[1.0], [5.0], [-5.0]]), tf.constant([4, 4, 0]), [9, 1])
    assert float(largest(slices)) == 6.0
    assert float(tf.function(lambda: largest(slices), jit_compile=True)()) == 6.0


def test_a_layer_that_is_called_twice(tmp_path):
    keras.utils.set_random_seed(3)
    one, other = keras.Input((6,)), keras.Input((6,))
    shared = layers.Dense(4, "tanh", name="shared")
    joined = layers.Concatenate()([shared(one), shared(other)])
    model = keras.Model([one, other], layers.Dense(1)(joined))
    model.compile("sgd", "mse")
    kernel, bias = model.get_weights()[:2]
    x = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
    found, _ = first_values(model, [x, 9 * x], np.ones((8, 1)), tmp_path)
    for name, inputs in (("shared", x), ("shared (call 2)", 9 * x)):
        expected = abs(np.tanh(inputs @ kernel + bias)).mean()
        np.testing.assert_allclose(found[f"abs_mean/output/{name}"], expected, rtol=1e-4)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_gradients_of_outputs_without_the_loss_scale(policy, tmp_path):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [layers.Input((6,)), layers.Dense(4, name="first", dtype=policy), layers.Dense(1, name="o")]
    )
    optimizer = keras.optimizers.SGD(0.1)
    if policy == "mixed_float16":
        scaled = getattr(keras.optimizers, "LossScaleOptimizer", None)
        optimizer = (scaled or keras.mixed_precision.LossScaleOptimizer)(optimizer)
    model.compile(optimizer, "mse")
    x, y = data(1)
    kernel, bias, last, offset = model.get_weights()
    found, _ = first_values(model, x[:8], y[:8], tmp_path)
    slope = 2 * ((x[:8] @ kernel + bias) @ last + offset - y[:8]) / 8
    expected = {"o": abs(slope).mean(), "first": abs(slope @ last.T).mean()}
    for name, value in expected.items():
        np.testing.assert_allclose(found[f"abs_mean/gradient/{name}"], value, rtol=5e-3)


def test_logged_steps_that_are_not_checked(tmp_path):
    """Checks that the next checked step is logged, and not only the steps that are due for both."""
    x, y = data(30)
    check = FiniteCheck(log_dir=tmp_path, every_n_steps=3, log_every_n_steps=10)
    fit(make(), x, y, check)
    found, _ = scalars(tmp_path)
    assert sorted(found["abs_mean/output/first"]) == [1, 13, 22]


def test_a_logged_step_of_a_later_fit(tmp_path):
    """Checks that a step which is due, and is not checked, is logged in the next `fit`."""
    x, y = data(7)
    model = make()
    check = FiniteCheck(log_dir=tmp_path, every_n_steps=7, log_every_n_steps=10)
    for _ in range(5):
        fit(model, x, y, check)
    found, _ = scalars(tmp_path)
    assert sorted(found["abs_mean/output/first"]) == [1, 15, 22]
