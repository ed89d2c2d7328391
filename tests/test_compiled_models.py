"""Models that were compiled before they were wrapped: reports of `fit`, and saving.

NumPy computes the losses from the effective weights. In Keras the metrics of an inner model belong
to the inner model; a wrapper must follow.
"""

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import quick_rows
from tables_by_make_target import with_slow_rest

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
    """A model that is functional inside and compiles itself, as the models of keras-hub do."""

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


# Whether the model inside was trained before. Only then its metrics are built.
CASES = {
    "parametrize, subclassed": (subclassed, _parametrized, True),
    "parametrize, task": (Task, _parametrized, False),
    "Sequential, subclassed": (subclassed, _in_sequential, False),
    "Sequential, Sequential": (sequential, _in_sequential, True),
    "functional, task": (Task, _in_functional, False),
    "functional, Sequential of subclassed": (subclassed, _around_sequential, False),
    "wrapped twice": (sequential, _twice, False),
}


_KEPT = ("parametrize, subclassed", "Sequential, Sequential", "functional, task", "wrapped twice")


@quick_rows("parametrize, subclassed", "functional, task")
@pytest.mark.parametrize("name", with_slow_rest(CASES, _KEPT))
def test_losses_and_metrics_equal_the_outer_models(name: str) -> None:
    make, wrap, trained = CASES[name]
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
    wrapped = layers.VariationalNoise(subclassed(), 0.001, seed=1)
    model = keras.Sequential([keras.Input((3,)), wrapped])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1)
    kept = tmp_path / "{epoch}.weights.h5"
    save = keras.callbacks.ModelCheckpoint(
        str(kept), "val_loss", save_best_only=True, save_weights_only=True
    )
    history = model.fit(
        X, Y, validation_data=(X, Y), epochs=3, batch_size=12, callbacks=[stop, save], verbose=0
    ).history["val_loss"]
    assert all(np.diff(history) < 0) and len(history) == 3
    np.testing.assert_allclose([stop.best, save.best], history[-1])
    assert len(list(tmp_path.iterdir())) == 3


class WithMetric(keras.layers.Layer):
    """A layer with a metric of its own, which belongs to the outer model too, as in Keras."""

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


def _state(model: keras.Model) -> list:
    """Returns the variables of the optimizers of a model and of the models in it."""
    found = []
    for inner in _keras.layers.all_layers(model):
        optimizer = getattr(inner, "optimizer", None)
        if optimizer is not None:
            found.append(optimizer.variables)
    assert len(found) == 2
    return [v for variables in found for v in (variables() if callable(variables) else variables)]


def _filled(wrap: Callable, start: int) -> keras.Model:
    """Returns a model with a compiled one inside, and other values in the optimizers' variables."""
    inner = subclassed()
    model, _ = wrap(inner)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    for one in (inner, model):
        one.optimizer.build(one.trainable_variables)
    for i, v in enumerate(_state(model)):
        v.assign(tf.cast(tf.fill(v.shape, start + i), v.dtype))
    return model


def _same(one: keras.Model, other: keras.Model) -> None:
    for found, expected in zip(_state(one), _state(other), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    for found, expected in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(found, expected)


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
def test_the_state_of_both_optimizers_is_saved(wrap, copied, tmp_path: Path) -> None:
    model = _filled(wrap, 1)
    _same(copied(tmp_path, model, lambda: _filled(wrap, 100)), model)


class _Stop(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs=None) -> None:
        if epoch == 1:
            raise InterruptedError


def test_a_backup_resumes_both(tmp_path: Path) -> None:
    def made() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = _filled(_parametrized, 1)
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
    _same(going_on, whole)
