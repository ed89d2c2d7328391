"""Decay towards the first weights, against NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import two_replicas
from stack_marks import extended

from tfwd import _keras
from tfwd.optimizers import DecoupledWeightDecay

RNG = np.random.default_rng(0)
KERNEL, BIAS, X, Y = (RNG.normal(size=shape) for shape in ((4, 3), (3,), (8, 4), (8, 3)))
RATE, DECAY = 0.1, 0.2


def model(**options):
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="dense")])
    net.set_weights([KERNEL, BIAS])
    optimizer = DecoupledWeightDecay(
        keras.optimizers.SGD(RATE), DECAY, exclude="bias", towards="start", **options
    )
    net.compile(optimizer, "mse", jit_compile=False)
    return net


def steps(kernel, bias, count):
    """Returns the steps, computed by hand."""
    for _ in range(count):
        error = 2 * (X @ kernel + bias - Y) / Y.size
        kernel = kernel - DECAY * (kernel - KERNEL)
        kernel, bias = kernel - RATE * X.T @ error, bias - RATE * error.sum(0)
    return kernel, bias


def fit(net, epochs):
    net.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)


def test_steps_equal_numpy():
    net = model()
    fit(net, 4)
    for found, expected in zip(net.get_weights(), steps(KERNEL, BIAS, 4), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_after_a_restart_it_is_towards_the_same(tmp_path):
    net = model()
    fit(net, 2)
    path = tf.train.Checkpoint(model=net, optimizer=net.optimizer).write(str(tmp_path / "state"))
    fresh = model()
    fresh.optimizer.build(fresh.trainable_variables)
    tf.train.Checkpoint(model=fresh, optimizer=fresh.optimizer).read(path)
    fit(fresh, 2)
    for found, expected in zip(fresh.get_weights(), steps(KERNEL, BIAS, 4), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@extended
def test_saved_with_the_model(tmp_path):
    net = model()
    fit(net, 2)
    net.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.optimizer.towards == "start"
    fit(again, 2)
    for found, expected in zip(again.get_weights(), steps(KERNEL, BIAS, 4), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("sparse", ["table", "rows"])
def test_rows_of_a_table(sparse):
    table = tf.Variable(RNG.normal(size=(5, 2)), dtype=tf.float32, name="table")
    start = table.numpy()
    optimizer = DecoupledWeightDecay(
        keras.optimizers.SGD(RATE), DECAY, towards="start", sparse=sparse
    )
    expected = start.copy()
    for rows in ([1, 3], [3, 4], [1, 1]):
        gradient = np.ones((2, 2), "float32")
        optimizer.apply_gradients([(tf.IndexedSlices(gradient, rows, [5, 2]), table)])
        named = sorted(set(rows)) if sparse == "rows" else list(range(5))
        expected[named] -= DECAY * (expected[named] - start[named])
        np.subtract.at(expected, rows, RATE)
    np.testing.assert_allclose(table, expected, atol=1e-6)


def test_a_large_variable_in_one_pass():
    """Checks that one compiled function decays and updates a large variable of SGD."""
    start = RNG.normal(size=2**18).astype("float32")
    variable = tf.Variable(start, name="large")
    optimizer = DecoupledWeightDecay(keras.optimizers.SGD(RATE), DECAY, towards="start")
    expected = start.astype(np.float64)
    for _ in range(3):
        optimizer.apply_gradients([(tf.ones_like(variable), variable)])
        expected = expected - DECAY * (expected - start) - RATE
    np.testing.assert_allclose(variable, expected, atol=1e-5)


def test_variables_without_a_gradient():
    used, unused = tf.Variable([1.0], name="used"), tf.Variable([2.0], name="unused")
    optimizer = DecoupledWeightDecay(
        keras.optimizers.SGD(RATE), DECAY, towards="start", decay_unused=True
    )
    optimizer.build([used, unused])
    unused.assign([4.0])
    optimizer.apply_gradients([(tf.constant([0.0]), used), (None, unused)])
    np.testing.assert_allclose(unused, [4.0 - DECAY * (4.0 - 2.0)], rtol=1e-6)


@pytest.mark.slow
def test_two_replicas():
    strategy = two_replicas()
    with strategy.scope():
        net = model()
    fit(net, 4)
    for found, expected in zip(net.get_weights(), steps(KERNEL, BIAS, 4), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="towards='begin': expected one of zero, start"):
        DecoupledWeightDecay("sgd", 0.1, towards="begin")


def test_towards_zero_nothing_is_kept():
    optimizer = DecoupledWeightDecay(keras.optimizers.SGD(RATE), DECAY)
    optimizer.build([tf.Variable([1.0], name="weight")])
    assert not [v for v in optimizer.variables if "start" in _keras.variables.path(v)]
