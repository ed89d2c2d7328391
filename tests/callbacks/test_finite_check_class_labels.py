"""`FiniteCheck` on class labels and ids with NaN, which TensorFlow refuses as integers on a CPU."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from finite_check_fits import tf_variable
from planted_nan_models import state
from replicas import two_replicas
from tables_by_make_target import with_slow_rest

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError

layers = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 5)).astype("float32")
CLASSES = RNG.integers(0, 4, 40).astype("float32")
IDS = RNG.integers(0, 9, (40, 3)).astype("float32")


class Gathers(layers.Layer):
    """A layer of its own that uses its inputs as indices."""

    def build(self, shape):
        self.table = self.add_weight(shape=(9, 2), name="table")

    def call(self, x):
        return tf.gather(tf.convert_to_tensor(self.table), tf.cast(x, tf.int32))


def table_entry(labels, predictions):
    """A metric that uses labels as indices, which the loss does not."""
    return tf.gather(tf.constant([0.0, 1.0]), tf.cast(labels[:, 0], tf.int32))


# Layers before the last one, the data, and whether the labels are classes.
MODELS = {
    "labels": ([layers.Dense(6, "relu")], X, CLASSES),
    "ids": ([layers.Embedding(9, 2), layers.Flatten()], IDS, X[:, :1]),
    "own layer": ([Gathers(), layers.Flatten()], IDS, X[:, :1]),
    "metric": ([layers.Dense(6, "relu")], X, (CLASSES[:, None] > 1).astype("float32")),
}


def fitted(name, *callbacks, planted=True, eager=False, optimizer="adam"):
    """Fits a model on batches of 8. The third batch has a NaN in row 3, or is left out."""
    before, x, y = MODELS[name]
    x, y = x.copy(), y.copy()
    (y if name in ("labels", "metric") else x.reshape(40, -1)[:, 0])[19] = np.nan
    keep = [i for i in range(5) if planted or i != 2]
    keras.utils.set_random_seed(2)
    copies = [type(layer).from_config(layer.get_config()) for layer in before]
    units, activation = (4, "softmax") if name == "labels" else (1, None)
    head = layers.Dense(units, activation, name="head")
    model = keras.Sequential([keras.Input(x.shape[1:]), *copies, head])
    loss, metric = "mse", table_entry if name == "metric" else "mae"
    if name == "labels":
        loss = keras.losses.SparseCategoricalCrossentropy(name="renamed")
        metric = "accuracy"
    model.compile(optimizer, loss, metrics=[metric], run_eagerly=eager, jit_compile=False)
    rows = np.concatenate([np.arange(8 * i, 8 * i + 8) for i in keep])
    history = model.fit(
        x[rows], y[rows], batch_size=8, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    return model, history.history


@pytest.mark.parametrize("case", with_slow_rest(["labels", "ids", "labels, eager"], {"labels"}))
def test_a_skipped_batch_is_as_if_it_were_left_out(case):
    name, eager = case.split(",")[0], "eager" in case
    check = FiniteCheck("skip")
    with pytest.warns(UserWarning, match="skipped a step"):
        model, history = fitted(name, check, eager=eager)
    plain, expected = fitted(name, planted=False, eager=eager)
    assert [report.step for report in check.reports] == [3]
    for one, other in zip(state(model), state(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_report_names_the_row(name):
    with pytest.raises(NonFiniteError, match="in row 3 of the batch") as caught:
        fitted(name, FiniteCheck())
    report = caught.value.report
    assert report.first.frame.name == ("y" if name in ("labels", "metric") else "x")
    assert (report.step, report.place) == (3, "epoch 1, batch 3")


def test_a_step_that_an_own_layer_ends_is_not_skipped():
    """Checks that the error says that the step may have changed metrics and states."""
    with warnings.catch_warnings(), pytest.raises(NonFiniteError) as caught:
        warnings.simplefilter("error", UserWarning)
        fitted("own layer", FiniteCheck("skip"))
    assert caught.value.report.note.startswith(
        "An operation failed on these data, so the step cannot be skipped. Metrics and states of "
        "layers may have changed. The weights have their values from before the step."
    )


@pytest.mark.parametrize("action", ["raise", "skip"])
@pytest.mark.parametrize("case", with_slow_rest(["graph", "eager", "eager, Ftrl"], {"graph"}))
def test_a_step_that_a_metric_ends_changes_no_weight(case, action):
    """Checks Ftrl too, whose update is made before it is known to be finite."""
    seen = []

    class Weights(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append([v.numpy() for v in (*self.model.weights, self.model.optimizer.iterations)])
            self.of = self.model

    kept = Weights()
    options = {"eager": "eager" in case, "optimizer": "ftrl" if "Ftrl" in case else "adam"}
    with pytest.raises(NonFiniteError, match="cannot be skipped") as caught:
        fitted("metric", FiniteCheck(action), kept, **options)
    assert caught.value.report.first.frame.name == "y"
    assert "The weights have their values from before the step." in caught.value.report.note
    now = (*kept.of.weights, kept.of.optimizer.iterations)
    for one, other in zip(now, seen[2], strict=True):
        np.testing.assert_array_equal(one.numpy(), other)


def test_a_class_out_of_range_keeps_its_error(monkeypatch):
    wrong = np.where(np.arange(40) == 5, 7, CLASSES).astype("float32")
    monkeypatch.setitem(MODELS, "labels", (*MODELS["labels"][:2], wrong))
    with pytest.raises(tf.errors.InvalidArgumentError, match="label value of 7"):
        fitted("labels", FiniteCheck())


def test_labels_that_are_left_out_of_the_check_keep_their_error():
    with pytest.raises(tf.errors.InvalidArgumentError, match="outside the valid range"):
        fitted("labels", FiniteCheck(exclude="y"))


def test_a_step_that_a_metric_ends_on_two_replicas():
    """Checks that the weights of both replicas stay as they were."""
    strategy = two_replicas()
    with strategy.scope():
        layers_ = [layers.Dense(6, "relu"), layers.BatchNormalization(), layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers_])
        metrics = [table_entry]
        model.compile("adam", "mse", metrics=metrics, jit_compile=False)
    labels = (CLASSES[:, None] > 1).astype("float32")
    model.fit(X[:8], labels[:8], batch_size=8, verbose=0)
    before = [v.numpy() for v in model.trainable_weights]
    bad = np.where(np.arange(8)[:, None] == 5, np.nan, labels[:8])
    with pytest.raises(NonFiniteError, match="cannot be skipped"):
        model.fit(X[:8], bad, batch_size=8, verbose=0, callbacks=[FiniteCheck("skip")])
    for variable, value in zip(model.trainable_weights, before, strict=True):
        for copy in strategy.experimental_local_results(tf_variable(variable)):
            np.testing.assert_array_equal(copy.numpy(), value)
