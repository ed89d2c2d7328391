"""A model that was compiled before it was wrapped: what `fit` reports, and what is saved of it.

The losses are computed by NumPy from the effective weights. Keras leaves the metrics of a model
inside another one to that model; so must a wrapper.
"""

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfwd
from tfwd import _keras, layers
from tfwd import parametrizations as P

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(12, 3)).astype("float32")
Y = X @ np.array([[1.0], [-2.0], [0.5]], "float32")


@keras.saving.register_keras_serializable("test_compiled_models")
class Subclassed(keras.Model):
    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(1, name="dense")

    def build(self, shape) -> None:
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.dense(x)


@keras.saving.register_keras_serializable("test_compiled_models")
class Task(keras.Model):
    """One that is functional inside and compiles itself, as keras-hub's do."""

    def __init__(self, **kwargs) -> None:
        inputs = keras.Input((3,))
        super().__init__(inputs, keras.layers.Dense(1, name="dense")(inputs), **kwargs)
        self.compile("adam", "mae", metrics=["mae"])

    def get_config(self):
        return {"name": self.name}


def subclassed() -> keras.Model:
    model = Subclassed()
    model(X)
    model.compile("adam", "mae", metrics=["mse"])
    return model


def sequential() -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="dense")])
    model.compile("adam", "mae", metrics=["mse"])
    return model


def _dropped(model: keras.Model) -> keras.layers.Layer:
    return layers.WeightDropout(model, 0.5, weights="dense/kernel", seed=1)


def _parametrized(model: keras.Model) -> tuple:
    found = tfwd.parametrize(model, {"dense/kernel": P.Dropout(0.5)}, seed=1)
    return found, found


def _in_sequential(model: keras.Model) -> tuple:
    wrapped = _dropped(model)
    return keras.Sequential([keras.Input((3,)), wrapped]), wrapped


def _in_functional(model: keras.Model) -> tuple:
    inputs, wrapped = keras.Input((3,)), _dropped(model)
    return keras.Model(inputs, keras.layers.Activation("linear")(wrapped(inputs))), wrapped


def _around_sequential(model: keras.Model) -> tuple:
    return _in_functional(keras.Sequential([keras.Input((3,)), model]))


def _twice(model: keras.Model) -> tuple:
    wrapped = layers.VariationalNoise(model, 0.1, weights="dense/kernel", seed=2)
    return _in_functional(wrapped)


CASES = {
    "parametrize, subclassed": (subclassed, _parametrized),
    "parametrize, task": (Task, _parametrized),
    "Sequential, subclassed": (subclassed, _in_sequential),
    "Sequential, Sequential": (sequential, _in_sequential),
    "functional, task": (Task, _in_functional),
    "functional, Sequential of subclassed": (subclassed, _around_sequential),
    "wrapped twice": (sequential, _twice),
}
each = pytest.mark.parametrize(("make", "wrap"), CASES.values(), ids=CASES)


@each
@pytest.mark.parametrize("trained", [False, True], ids=["compiled", "trained"])
def test_losses_and_metrics_are_those_of_the_outer_model(make, wrap, trained: bool) -> None:
    inner = make()
    if trained:
        inner.fit(X, Y, verbose=0)
    model, wrapped = wrap(inner)
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    first = wrapped.calls
    history = model.fit(
        X, Y, validation_data=(X, Y), epochs=2, batch_size=12, shuffle=False, verbose=0
    ).history
    names = {"loss", "mae", "val_loss", "val_mae"}
    assert set(history) == names
    bias = inner.get_weights()[1]
    for epoch in range(2):
        (kernel,) = wrapped.effective_weights(first + epoch).values()
        error = X @ np.asarray(kernel) + bias - Y
        np.testing.assert_allclose(history["loss"][epoch], np.mean(error**2), rtol=1e-5)
        np.testing.assert_allclose(history["mae"][epoch], np.mean(np.abs(error)), rtol=1e-5)
    error = X @ inner.get_weights()[0] + bias - Y
    np.testing.assert_allclose(history["val_loss"], [np.mean(error**2)] * 2, rtol=1e-5)
    np.testing.assert_allclose(history["val_mae"], [np.mean(np.abs(error))] * 2, rtol=1e-5)


def test_callbacks_see_the_loss(tmp_path: Path) -> None:
    model, _ = _in_sequential(subclassed())
    model.compile(keras.optimizers.SGD(0.1), "mse")
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1)
    kept = tmp_path / "{epoch}.weights.h5"
    save = keras.callbacks.ModelCheckpoint(
        str(kept), "val_loss", save_best_only=True, save_weights_only=True
    )
    history = model.fit(
        X, Y, validation_data=(X, Y), epochs=4, batch_size=12, callbacks=[stop, save], verbose=0
    ).history["val_loss"]
    best = np.minimum.accumulate(history)
    bettered = [0, *(i for i in range(1, len(history)) if history[i] < best[i - 1])]
    assert len(bettered) > 1
    np.testing.assert_allclose([stop.best, save.best], best[-1])
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{i + 1}.weights.h5" for i in bettered]


class WithMetric(keras.layers.Layer):
    """A layer with a metric of its own, which is the outer model's too, as in Keras."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.kernel = self.add_weight(shape=(3, 1), name="kernel", initializer="ones")
        self.size = keras.metrics.Mean(name="size")

    def call(self, x):
        self.size.update_state(tf.reduce_mean(tf.abs(x)))
        return tf.matmul(x, tf.convert_to_tensor(self.kernel))


def test_a_metric_of_a_layer_inside_is_still_reported() -> None:
    layer = WithMetric()
    wrapped = layers.WeightDropout(keras.Sequential([keras.Input((3,)), layer]), 0.5, seed=1)
    assert wrapped.metrics == [layer.size]
    model = keras.Sequential([keras.Input((3,)), wrapped])
    model.compile("sgd", "mse")
    history = model.evaluate(X, Y, batch_size=12, verbose=0, return_dict=True)
    np.testing.assert_allclose(history["size"], np.mean(np.abs(X)), rtol=1e-5)


def _optimizer(model: keras.Model) -> list[np.ndarray]:
    """The state of the optimizer of the only compiled model inside."""
    (found,) = [
        inner.optimizer
        for inner in _keras.all_layers(model)
        if inner is not model and getattr(inner, "optimizer", None) is not None
    ]
    variables = found.variables() if callable(found.variables) else found.variables
    return [np.array(v) for v in variables]


def _kept(path: Path, model: keras.Model, again: Callable[[], keras.Model]) -> keras.Model:
    model.save(path / "model.keras")
    return keras.saving.load_model(path / "model.keras")


def _weights(path: Path, model: keras.Model, again: Callable[[], keras.Model]) -> keras.Model:
    model.save_weights(path / "model.weights.h5")
    other = again()
    other.load_weights(path / "model.weights.h5")
    return other


def _checkpoint(path: Path, model: keras.Model, again: Callable[[], keras.Model]) -> keras.Model:
    file = tf.train.Checkpoint(model=model).write(str(path / "checkpoint"))
    other = again()
    tf.train.Checkpoint(model=other).read(file)
    return other


@pytest.mark.parametrize("copied", [_kept, _weights, _checkpoint])
@pytest.mark.parametrize("wrap", [_parametrized, _in_sequential])
def test_the_state_of_both_optimizers_is_saved_once(wrap, copied, tmp_path: Path) -> None:
    def made(epochs: int) -> keras.Model:
        inner = subclassed()
        inner.fit(X, Y, epochs=epochs, verbose=0)
        model, _ = wrap(inner)
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.fit(X, Y, epochs=epochs, verbose=0)
        return model

    model = made(2)
    other = copied(tmp_path, model, lambda: made(1))
    for found, expected in zip(_optimizer(other), _optimizer(model), strict=True):
        np.testing.assert_array_equal(found, expected)
    for one in (model, other):
        one.fit(X, Y, batch_size=12, verbose=0)
    for found, expected in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(found, expected)


class _Stop(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs=None) -> None:
        if epoch == 1:
            raise InterruptedError


def test_a_backup_goes_on_with_both(tmp_path: Path) -> None:
    def made() -> keras.Model:
        keras.utils.set_random_seed(0)
        inner = subclassed()
        inner.fit(X, Y, shuffle=False, verbose=0)
        model, _ = _parametrized(inner)
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    def fit(model: keras.Model, *callbacks: keras.callbacks.Callback) -> list[float]:
        history = model.fit(
            X, Y, epochs=3, batch_size=12, shuffle=False, verbose=0, callbacks=list(callbacks)
        )
        return history.history["loss"]

    whole, stopped, going_on = made(), made(), made()
    losses = fit(whole)
    with pytest.raises(InterruptedError):
        fit(stopped, keras.callbacks.BackupAndRestore(str(tmp_path)), _Stop())
    resumed = fit(going_on, keras.callbacks.BackupAndRestore(str(tmp_path)))
    np.testing.assert_allclose(resumed, losses[1:], rtol=1e-6)
    for found, expected in zip(going_on.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(found, expected)
    for found, expected in zip(_optimizer(going_on), _optimizer(whole), strict=True):
        np.testing.assert_array_equal(found, expected)
