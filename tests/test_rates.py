"""Rates that are schedules: their valid results, and the time of errors."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import quick_rows

from tfwd import _keras, layers
from tfwd import parametrizations as P

GENERATOR = tf.random.Generator.from_seed(1)

BAD = {
    "vector": (lambda call: [0.1, 0.2], "real scalar; for call 0.*shape \\(2,\\)"),
    "one entry": (lambda call: tf.constant([0.1]), "real scalar.*shape \\(1,\\)"),
    "complex": (lambda call: 0.5 + 0.5j, "real scalar.*complex"),
    "complex tensor": (lambda call: tf.complex(0.1, 0.0), "real scalar.*complex64"),
    "text": (lambda call: "0.5", "real scalar.*string"),
    "bool": (lambda call: True, "real scalar.*bool"),
    "nothing": (lambda call: None, "real scalar.*None"),
    "random": (lambda call: random.random(), "the call; for call 0 it returned .* and then"),
    "NumPy's": (lambda call: np.random.rand() / 2, "number of the call"),
    "TensorFlow's": (lambda call: tf.random.uniform([]), "number of the call"),
    "a generator's": (lambda call: GENERATOR.uniform([]), "number of the call"),
    "random later": (
        lambda call: 0.5 * random.random() if int(call) > 10 else 0.0, "the call; for call 1000"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_schedule_that_cannot_be_used_is_refused_at_once(case: str) -> None:
    schedule, message = BAD[case]
    where = "weight 'kernel' of layer 'd': rate must be a schedule"
    with pytest.raises(ValueError, match=where + ".*" + message):
        layers.WeightDropout(keras.layers.Dense(2, name="d"), schedule, seed=1)
    with pytest.raises(ValueError, match="stddev must be a schedule.*" + message):
        layers.VariationalNoise(keras.layers.Dense(2, name="d"), schedule, seed=1)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda call: tf.stack([call, call]) * 0, r"shape \(2,\)"),
        (lambda call: tf.complex(tf.cast(call, tf.float32), 0.0), "complex64"),
    ],
)
def test_errors_at_the_read_of_a_schedule_name_the_weight_too(schedule, message: str) -> None:
    switch = []  # a schedule may say something else by then

    def late(call):
        return schedule(call) if switch else 0.5

    wrapped = layers.WeightDropout(keras.layers.Dense(2), late, seed=1, name="w")
    wrapped(tf.ones([1, 3]), training=True)
    switch.append(True)
    with pytest.raises(ValueError, match=f"weight 'kernel' of layer 'w': .*real scalar.*{message}"):
        wrapped(tf.ones([1, 3]), training=True)
    with pytest.raises(ValueError, match=message):
        tf.function(lambda: wrapped(tf.ones([1, 3]), training=True))()


@pytest.mark.parametrize("value", [[0.1, 0.2], 0.1 + 0.1j, True])
def test_variables_and_tensors_that_are_no_real_scalars_are_refused(value) -> None:
    for given in (tf.Variable(value), tf.constant(value)):
        with pytest.raises(ValueError, match="'kernel' of layer 'd': rate must be .*got"):
            layers.WeightDropout(keras.layers.Dense(2, name="d"), given, seed=1)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda call: 0,
        lambda call: np.float64(0.5),
        lambda call: tf.minimum(tf.cast(call, tf.float64), 0.5),
        lambda call: tf.constant(0.5, tf.float16),
        keras.optimizers.schedules.PolynomialDecay(0.5, 10, 0.1),
    ],
)
def test_schedules_of_any_real_kind_are_taken(schedule) -> None:
    dense = layers.WeightDropout(keras.layers.Dense(50), schedule, seed=1)
    dense(tf.ones([1, 50]))
    weight = dense.effective_weights(3)["kernel"]
    rate = float(schedule(tf.constant(3, tf.int64)))
    assert abs(float(tf.reduce_mean(tf.cast(weight == 0.0, tf.float32))) - rate) < 0.06


def test_a_schedule_may_read_what_a_function_is_given() -> None:
    """Checks a schedule that reads tensors of the traced function."""

    @tf.function
    def rates(given):
        return P.Dropout(lambda call: given).at(tf.constant(0, tf.int64)).rate

    assert float(rates(tf.constant(0.25))) == 0.25
    variable = tf.Variable(0.25)
    wrapped = layers.WeightDropout(keras.layers.Dense(2), lambda call: variable * 1.0, seed=1)
    wrapped(tf.ones([1, 3]), training=True)
    assert _keras.layer_building.has_weights(wrapped.layer)


DRAWING = {
    "dropout": lambda rate, n: layers.WeightDropout(keras.layers.Dense(n), rate, seed=1),
    "noise": lambda rate, n: layers.VariationalNoise(keras.layers.Dense(n), rate, seed=1),
    "mixout": lambda rate, n: layers.Mixout(keras.layers.Dense(n), rate, seed=1),
    "locked": lambda rate, n: layers.LockedDropout(rate, seed=1),
}


@quick_rows("dropout", "locked")
@pytest.mark.parametrize("kind", DRAWING)
def test_a_rate_that_leaves_its_range_under_xla(kind: str) -> None:
    """XLA drops the assertion; then all is NaN, and not zeros or no dropout at all."""
    for size in (3, 300):  # a small weight and a large one
        rate = tf.Variable(0.25)
        layer = DRAWING[kind](rate, size)
        x = tf.ones([1, 2, size])
        run = tf.function(lambda x, layer=layer: layer(x, training=True), jit_compile=True)
        run(x)
        for value in (np.nan, -0.5, *([] if kind == "noise" else [1.0, 1.5])):
            rate.assign(value)
            assert np.isnan(run(x).numpy()).all(), (size, value)
            with pytest.raises(tf.errors.InvalidArgumentError, match="must be at least 0 and"):
                layer(x, training=True)
        rate.assign(0.5)
        assert np.isfinite(run(x).numpy()).all()
