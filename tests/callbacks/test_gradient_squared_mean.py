"""`GradientSquaredMean` in `fit`: its records, logs and plots, and no effect on training."""

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import two_replicas
from stack_marks import SLOW_ON_KERAS_2, extended, quick_rows

from tfwd import callbacks, gradients, layers
from tfwd.callbacks import gradient_squared_mean as gradients_callback

pytestmark = SLOW_ON_KERAS_2

L = keras.layers
X = np.random.default_rng(0).normal(size=(24, 3)).astype("f")
Y = np.random.default_rng(1).normal(size=(24, 2)).astype("f")


def model(**compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    inner = layers.WeightDropout(L.Dense(4, "tanh"), 0.5, seed=1)
    made = keras.Sequential([keras.Input((3,)), inner, L.Dropout(0.2, seed=2), L.Dense(2)])
    made.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
    return made


def fit(made: keras.Model, *given: Any, epochs: int = 2) -> keras.callbacks.History:
    return made.fit(
        X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(given)
    )


@quick_rows("compiled0", "compiled1")
@pytest.mark.parametrize("compiled", [{}, {"run_eagerly": True}, {"steps_per_execution": 3}])
def test_measures_every_n_batches_and_training_is_the_same(compiled: dict) -> None:
    plain = model(**compiled)
    fit(plain)
    watched = model(**compiled)
    callback = callbacks.GradientSquaredMean(every_n_steps=3)
    history = fit(watched, callback)
    assert [record["step"] for record in callback.records] == [0, 3]
    for a, b in zip(plain.get_weights(), watched.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert watched.layers[0].calls == 6
    assert history.history["gradient_squared_mean"] == [
        record["squared_mean"] for record in callback.records
    ]


class AroundUnbuilt(keras.Model):
    """A subclassed model around a Sequential without inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = keras.Sequential([L.Dense(4, "tanh"), L.Dense(2)])

    def call(self, inputs: Any) -> Any:
        return self.body(inputs)


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_model_that_is_built_by_its_first_step(eagerly: bool) -> None:
    """Compares with the gradients of single examples, from a tape."""
    keras.utils.set_random_seed(1)
    made = AroundUnbuilt()
    made.compile("sgd", "mse", run_eagerly=eagerly)
    callback = callbacks.GradientSquaredMean(every_n_steps=100)
    fit(made, callback, epochs=1)
    keras.utils.set_random_seed(1)
    twin, squares = AroundUnbuilt(), []
    twin(X[:8])
    for x, y in zip(X[:8], Y[:8], strict=True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((twin(x[None]) - y) ** 2)
        found = tape.gradient(loss, twin.trainable_variables)
        squares.append(np.concatenate([np.ravel(g) for g in found]) ** 2)
    (record,) = callback.records
    assert record["squared_mean"] == pytest.approx(np.mean(squares), rel=1e-4)


def test_record_is_of_the_batch_before_its_step() -> None:
    watched, twin = model(), model()
    callback = callbacks.GradientSquaredMean(every_n_steps=100)  # with the flag of `moments`
    fit(watched, callback, epochs=1)
    moments = gradients.moments(twin, X[:8], Y[:8], "mse")
    (record,) = callback.records
    flat = [np.concatenate([np.ravel(m) for m in part]) for part in moments[:2]]
    assert record["batch_size"] == 8
    assert record["square_of_mean"] == pytest.approx(np.mean(flat[0] ** 2), rel=1e-5)
    assert record["squared_mean"] == pytest.approx(np.mean(flat[1]), rel=1e-5)
    variance = 8 / 7 * np.sum(flat[1] - flat[0] ** 2)
    signal = max(np.sum(flat[0] ** 2) - variance / 8, 0)
    assert record["signal_to_noise"] == pytest.approx(signal / variance, rel=1e-4)
    assert len(record["variables"]) == 4


@extended
def test_epochs_log_is_a_ratio_of_means() -> None:
    """Checks that one batch whose noise hides the signal does not spoil the epoch's value."""
    callback = callbacks.GradientSquaredMean(every_n_steps=1, training=True)
    history = fit(model(), callback, epochs=4).history
    assert any(math.isinf(record["noise_scale"]) for record in callback.records)
    for epoch in range(4):
        records = callback.records[3 * epoch : 3 * epoch + 3]
        variance = np.mean([record["variance"] for record in records])
        signal = max(np.mean([record["signal"] for record in records]), 0.0)
        wanted = variance / signal if signal else math.inf
        assert history["gradient_noise_scale"][epoch] == pytest.approx(wanted)
        assert history["gradient_signal_to_noise"][epoch] == pytest.approx(signal / variance)
    assert any(math.isfinite(scale) for scale in history["gradient_noise_scale"])


@extended
def test_second_fit_continues_and_another_model_starts_from_zero(tmp_path: Path) -> None:
    callback = callbacks.GradientSquaredMean(every_n_steps=2, log_dir=tmp_path)
    watched = model()
    fit(watched, callback, epochs=1)  # batches 0, 1, 2
    fit(watched, callback, epochs=1)  # batches 3, 4, 5
    assert [record["step"] for record in callback.records] == [0, 2, 4]
    steps = {
        event.step
        for events in tmp_path.glob("events.out.tfevents.*")
        for event in tf.compat.v1.train.summary_iterator(str(events))
        if event.summary.value
    }
    assert steps == {0, 2, 4}
    fit(model(), callback, epochs=1)
    assert [record["step"] for record in callback.records] == [0, 2]


@extended
def test_batches_of_several_steps_an_execution() -> None:
    callback = callbacks.GradientSquaredMean(every_n_steps=3)
    watched = model(steps_per_execution=4)
    watched.fit(X, Y, batch_size=2, verbose=0, callbacks=[callback])
    assert [record["step"] for record in callback.records] == [0, 4, 8]
    # Of an epoch's 6 batches, the second execution has two: 12 to 15, 16, 17, 18 to 21, 22, 23.
    watched.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[callback])
    assert [record["step"] for record in callback.records] == [0, 4, 8, 12, 18]


def test_tensorboard_and_plot(tmp_path: Path) -> None:
    callback = callbacks.GradientSquaredMean(
        every_n_steps=2, log_dir=tmp_path / "logs", plot=tmp_path / "plots" / "moments.png"
    )
    fit(model(), callback)
    (events,) = (tmp_path / "logs").glob("events.out.tfevents.*")
    tags = {
        value.tag
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
    }
    assert {f"gradient/{key}" for key in gradients_callback.KEYS} <= tags
    assert len(tags) == 4 * 5  # the model and its four weights
    assert (tmp_path / "plots" / "moments.png").read_bytes()[:4] == b"\x89PNG"


def test_matplotlib_is_imported_for_the_plot_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    fit(model(), callbacks.GradientSquaredMean(every_n_steps=2))


@extended
def test_replicas_measure_the_global_batch() -> None:
    # Collectives of two strategies in one process would be confused with each other.
    strategy = two_replicas()
    with strategy.scope():
        watched = model()
    callback = callbacks.GradientSquaredMean(every_n_steps=100)  # with the flag of `moments`
    fit(watched, callback, epochs=1)
    single = callbacks.GradientSquaredMean(every_n_steps=100, training=False)
    fit(model(), single, epochs=1)
    (found,), (wanted,) = callback.records, single.records
    assert found["batch_size"] == 8
    assert found["squared_mean"] == pytest.approx(wanted["squared_mean"], rel=1e-4)


def test_model_is_left_as_it_was() -> None:
    watched = model()
    one, two = (
        callbacks.GradientSquaredMean(every_n_steps=1),
        callbacks.GradientSquaredMean(every_n_steps=2),
    )
    fit(watched, one, two, epochs=1)
    assert not isinstance(getattr(watched.train_function, "__self__", None), type(one))
    fit(watched, epochs=1)
    assert (len(one.records), len(two.records)) == (3, 2)


class Interrupts(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise KeyboardInterrupt


@extended
def test_after_an_interrupt() -> None:
    watched, callback = model(), callbacks.GradientSquaredMean(every_n_steps=2)
    with pytest.raises(KeyboardInterrupt):
        fit(watched, callback, Interrupts())  # batches 0, 1, 2
    fit(watched, epochs=1)  # without it: nothing is measured, or counted
    assert len(callback.records) == 2
    with pytest.raises(KeyboardInterrupt):
        fit(watched, callback, Interrupts())  # batches 3, 4, 5
    fit(watched, callback, epochs=1)  # 6, 7, 8
    assert [record["step"] for record in callback.records] == [0, 2, 4, 6, 8]


def test_dataset_whose_size_is_not_known() -> None:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True).batch(8)
    callback = callbacks.GradientSquaredMean(every_n_steps=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        model().fit(data, epochs=3, shuffle=False, verbose=0, callbacks=[callback])
    assert [record["step"] for record in callback.records] == [0, 2, 4, 6, 8]


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="every_n_steps must be an int of at least 1, got 0"):
        callbacks.GradientSquaredMean(every_n_steps=0)
    made = keras.Sequential([keras.Input((3,)), L.Dense(2)])
    made.compile("sgd")
    with pytest.raises(ValueError, match="compiled without a loss"):
        fit(made, callbacks.GradientSquaredMean())


def test_by_default_a_model_with_batch_normalization_is_measured() -> None:
    made = keras.Sequential([keras.Input((3,)), L.Dense(4), L.BatchNormalization(), L.Dense(2)])
    made.compile("sgd", "mse")
    callback = callbacks.GradientSquaredMean()
    fit(made, callback, epochs=1)
    assert len(callback.records) == 1 and callback.records[0]["squared_mean"] > 0
    with pytest.raises(ValueError, match="BatchNormalization"):
        fit(made, callbacks.GradientSquaredMean(training=True), epochs=1)
