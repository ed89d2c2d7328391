"""Tests that a loss scale changes neither reported gradients nor causes nor checks."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import two_replicas
from stack_marks import IS_KERAS_2, needs_keras3

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError

SCALES = (keras.mixed_precision if IS_KERAS_2 else keras.optimizers).LossScaleOptimizer


def scaled(optimizer, kind, scale=2.0**10):
    if kind == "factor":
        optimizer.loss_scale_factor = scale
        return optimizer
    return SCALES(optimizer, initial_scale=scale)


KINDS = ["dynamic"] if IS_KERAS_2 else ["dynamic", "factor"]


def linear(optimizer, loss="mse", weight=1.0, **options):
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1, name="last")])
    model.layers[0].set_weights([np.full((6, 1), weight), np.zeros(1)])
    model.compile(optimizer, loss, **options)
    return model


def report_of(model, x, y, **options):
    with pytest.raises(NonFiniteError) as caught:
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[FiniteCheck(**options)])
    return caught.value.report


@pytest.mark.parametrize("kind", KINDS)
def test_weight_gradients_are_those_of_the_loss(kind):
    x, y = 100 * np.ones((8, 6), "float32"), np.zeros((8, 1), "float32")
    model = linear(scaled(keras.optimizers.SGD(3e38), kind), jit_compile=False)
    report = report_of(model, x, y)
    # d/dw mean((100 * 6)^2) = 2 * 600 * 100
    assert "The largest gradient is 1.2e+05, of" in report.causes[0].evidence
    found = {frame["name"]: frame for frame in report.to_dict()["frames"]}
    assert found["loss scale"]["abs_max"] == 1024
    kernels = [
        frame["abs_max"]
        for frame in report.to_dict()["frames"]
        if frame["kind"] == "weight gradient" and frame["name"].endswith("last/kernel")
    ]
    assert kernels == [pytest.approx(1.2e5)]
    # The gradient of the output is that of the scaled loss: 2 * 600 / 8 rows * 1024.
    outputs = [f["abs_max"] for f in report.to_dict()["frames"] if f["kind"] == "gradient"]
    assert outputs == [pytest.approx(1200 / 8 * 1024)]
    assert "Gradients of outputs have the loss scale 1024 as a factor" in str(report)


def test_a_growing_scale_is_not_a_growing_gradient():
    # The rate is 0, so the gradients are equal in all steps. The scale doubles in each step.
    growth = {"dynamic_growth_steps": 1}
    optimizer = SCALES(keras.optimizers.SGD(0.0), initial_scale=2.0, **growth)

    def loss(y, prediction):
        error = tf.reduce_mean(tf.square(prediction - y), -1)
        return tf.where(y[:, 0] == 7.0, tf.constant(np.inf), error)

    x, y = np.ones((80, 6), "float32"), np.zeros((80, 1), "float32")
    y[77] = 7.0
    report = report_of(linear(optimizer, loss, jit_compile=False), x, y)
    assert report.step == 10
    assert "exploding gradients" not in [cause.name for cause in report.causes]


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_a_gradient_whose_square_overflows_is_found(kind):
    # Adam's average of squares becomes infinite, although the gradient is finite.
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer = optimizer if kind == "none" else scaled(optimizer, kind, 2.0)
    x, y = np.full((8, 6), 1e10, "float32"), np.zeros((8, 1), "float32")
    report = report_of(linear(optimizer, jit_compile=False), x, y)
    assert report.first.frame.kind == "update"


def test_sparse_gradients_are_divided_too():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Embedding(9, 2, name="table")])
    model.layers[0].set_weights([np.ones((9, 2))])
    model.compile(scaled(keras.optimizers.SGD(3e38), "dynamic"), "mse", jit_compile=False)
    ids, y = np.full((8, 3), 4), np.zeros((8, 3, 2), "float32")
    y[...] = -299.0
    report = report_of(model, ids, y)
    gradients = [f for f in report.to_dict()["frames"] if f["kind"] == "weight gradient"]
    # Each of the 24 rows has 2 * 300 / 48 in each element, and all rows have the same id.
    assert [f["abs_max"] for f in gradients] == [pytest.approx(24 * 600 / 48)]


class AppliedInside(keras.Model):
    """A model whose training step applies scaled gradients in an inner function."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.update = tf.function(self._update)

    def call(self, x):
        return self.dense(x)

    def _update(self, *gradients):
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return tf.constant(0)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = 2.0**10 * tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        if IS_KERAS_2:
            gradients = self.optimizer.get_unscaled_gradients(gradients)
        self.update(*gradients)
        return {"loss": loss}


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_scale_in_an_inner_function_is_refused(is_traced):
    x, y = np.ones((16, 6), "float32"), np.ones((16, 1), "float32")
    model = AppliedInside()
    model(x)
    model.compile(scaled(keras.optimizers.SGD(1e-4), "dynamic"), jit_compile=False)
    if is_traced:
        model.fit(x, y, verbose=0)
    before = [np.array(value) for value in model.get_weights()]
    with pytest.raises(ValueError, match="cannot check the loss scale"):
        model.fit(x, y, verbose=0, callbacks=[FiniteCheck()])
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


class Scales(keras.callbacks.Callback):
    """Records the loss scale, its counter and the number of updates after each step."""

    def on_train_begin(self, logs=None):
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        held = (optimizer.dynamic_scale, optimizer.step_counter, optimizer.iterations)
        self.seen.append(tuple(float(np.asarray(variable)) for variable in held))


def scales(y, row, value, **options):
    """Trains on two replicas with a value in a row of the second of four batches."""
    strategy = two_replicas()
    x, y = np.ones((32, 6), "float32"), y.copy()
    y[8 + row] = value
    with strategy.scope():
        optimizer = SCALES(
            keras.optimizers.Adam(0.01), initial_scale=2.0**12, dynamic_growth_steps=2
        )
        policy = keras.DTypePolicy("mixed_float16")
        hidden = keras.layers.Dense(6, "relu", kernel_initializer="ones", dtype=policy)
        last = keras.layers.Dense(1, kernel_initializer="ones", dtype="float32")
        model = keras.Sequential([keras.layers.Input((6,)), hidden, last])
        model.compile(optimizer, "mse", jit_compile=False, **options)
    seen, check = Scales(), FiniteCheck("skip")
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": [check, seen]}
    model.fit(x, y, **options)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    return seen.seen, check


@pytest.mark.float16
@needs_keras3("decision by the gradients of one replica")
@pytest.mark.filterwarnings("ignore:FiniteCheck. skipped a step")
@pytest.mark.parametrize("row", [1, 5], ids=["first replica", "second replica"])
def test_two_replicas_lower_their_scale_together(row):
    """Checks an overflow on one replica: Keras alone applies NaN if it is the second one."""
    seen, check = scales(np.full((32, 1), 36.0, "float32"), row, 1000.0)
    assert [scale for scale, *_ in seen] == [2.0**12, 2.0**11, 2.0**11, 2.0**12]
    assert [updates for *_, updates in seen] == [1, 1, 2, 3]
    assert (check.scaled_down, check.reports) == (1, [])


@pytest.mark.float16
@needs_keras3("decision by the gradients of one replica")
@pytest.mark.filterwarnings("ignore:FiniteCheck. skipped a step")
@pytest.mark.parametrize("row", [1, 5], ids=["first replica", "second replica"])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_two_replicas_skip_a_step_with_a_scale(row, run_eagerly):
    """Checks that a skipped step, and the report on it, leave the scale and its counter alone."""
    targets = np.full((32, 1), 36.0, "float32")
    seen, check = scales(targets, row, np.nan, run_eagerly=run_eagerly)
    assert seen == [(2.0**12, 1, 1), (2.0**12, 1, 1), (2.0**13, 0, 2), (2.0**13, 1, 3)]
    assert [report.step for report in check.reports] == [2]
