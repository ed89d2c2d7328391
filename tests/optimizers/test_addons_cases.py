"""Rules of tensorflow-addons for AdamW, SGDW and the classes it extends, case by case."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from optimizer_tools import X, Y, model
from stack_marks import IS_KERAS_2, extended

from tfwd.optimizers.addons import SGDW, AdamW, extend_with_decoupled_weight_decay

D = 0.01
ADAM = {"learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8}
SGD = {"learning_rate": 0.001, "momentum": 0.9}
STARTS = np.array([[1.0, 2.0], [3.0, 4.0]])
GRADIENTS = np.array([[0.1, 0.1], [0.01, 0.01]])
TOLERANCE = {"float16": 2e-3, "float32": 2e-6, "float64": 1e-6}

dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


def by_adam(steps):
    m, v, weights = np.zeros((2, 2)), np.zeros((2, 2)), STARTS.copy()
    for t in range(1, steps + 1):
        m, v = 0.9 * m + 0.1 * GRADIENTS, 0.999 * v + 0.001 * GRADIENTS**2
        rate = 0.001 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        weights = weights - D * weights - rate * m / (np.sqrt(v) + 1e-8)
    return weights


def by_sgd(steps):
    velocity, weights = np.zeros((2, 2)), STARTS.copy()
    for _ in range(steps):
        velocity = 0.9 * velocity + GRADIENTS
        weights = weights - D * weights - 0.001 * velocity
    return weights


KINDS = {
    "AdamW": (AdamW, ADAM, by_adam),
    "SGDW": (SGDW, SGD, by_sgd),
    "extended": (extend_with_decoupled_weight_decay(keras.optimizers.SGD), SGD, by_sgd),
}
if IS_KERAS_2:
    legacy = keras.optimizers.legacy.SGD
    KINDS["extended legacy"] = (extend_with_decoupled_weight_decay(legacy), SGD, by_sgd)
kinds = pytest.mark.parametrize("kind", KINDS)


def follows(optimizer, expected, dtype, sparse=False, listed=False):
    """Checks three steps on two TensorFlow variables against the expected values."""
    weights = [tf.Variable(start, dtype=dtype, name=f"w{i}") for i, start in enumerate(STARTS)]
    gradients = [tf.constant(gradient, dtype) for gradient in GRADIENTS]
    if sparse:
        rows, shape = tf.constant([0, 1]), tf.constant([2])
        gradients = [tf.IndexedSlices(gradient, rows, shape) for gradient in gradients]
    options = {"decay_var_list": weights} if listed else {}
    for step in range(1, 4):
        optimizer.apply_gradients(zip(gradients, weights, strict=True), **options)
        for weight, value in zip(weights, expected(step), strict=True):
            np.testing.assert_allclose(weight.numpy(), value, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("how", ["dense", "sparse", "listed"])
@dtypes
@kinds
def test_three_steps(kind, dtype, how):
    made, arguments, expected = KINDS[kind]
    optimizer = made(weight_decay=D, **arguments)
    follows(optimizer, expected, dtype, sparse=how == "sparse", listed=how == "listed")


@pytest.mark.parametrize("kind", ["AdamW", "SGDW"])
def test_functions_for_the_rate_and_the_decay(kind):
    made, arguments, expected = KINDS[kind]
    arguments = {**arguments, "learning_rate": lambda: 0.001}
    follows(made(weight_decay=lambda: D, **arguments), expected, "float32")


@pytest.mark.parametrize("decay", [tf.constant(D), np.array(D, "float32")], ids=["tf", "np"])
def test_tensors_for_the_decay(decay):
    follows(SGDW(weight_decay=decay, **SGD), by_sgd, "float32")


@dtypes
@kinds
def test_a_row_that_is_repeated_is_the_row_with_twice_the_gradient(kind, dtype):
    made, arguments, _ = KINDS[kind]
    found = []
    for rows, part in (([1, 1], 0.1), ([1], 0.2)):
        table = tf.Variable([[1.0], [2.0]], dtype=dtype)
        optimizer = made(weight_decay=D, **arguments)
        parts = tf.fill([len(rows), 1], tf.constant(part, dtype))
        gradient = tf.IndexedSlices(parts, tf.constant(rows), tf.constant([2, 1]))
        for _ in range(4):
            optimizer.apply_gradients([(gradient, table)])
        found.append(table.numpy())
    np.testing.assert_allclose(*found, rtol=1e-7)
    if (kind, dtype) != (
        "AdamW",
        "float16",
    ):  # epsilon is 0 there, and a row without gradient becomes NaN
        assert found[0][0] == 1


@extended
def test_fit():
    net = model()
    net.compile(AdamW(learning_rate=1e-4, weight_decay=1e-4), "mse", metrics=["mae"])
    assert np.isfinite(net.fit(X, Y, verbose=0).history["loss"][0])


@pytest.mark.parametrize("by", ["apply_gradients", "minimize"])
@kinds
def test_the_list_wins_over_the_exclusion(kind, by):
    """Checks that exactly the listed variables are decayed; without a list the exclusion counts."""
    made, arguments, _ = KINDS[kind]
    arguments = {**arguments, "learning_rate": 0.0}
    kernel, bias = tf.Variable([8.0], name="kernel"), tf.Variable([8.0], name="bias")
    optimizer = made(weight_decay=0.5, exclude_from_weight_decay=["bias"], **arguments)

    def step(**options):
        if by == "minimize":
            optimizer.minimize(lambda: kernel * bias, [kernel, bias], **options)
        else:
            pairs = [(tf.ones([1]), kernel), (tf.ones([1]), bias)]
            optimizer.apply_gradients(pairs, **options)
        return float(kernel[0]), float(bias[0])

    assert step(decay_var_list=[bias]) == (8, 4)
    assert step(decay_var_list=[kernel, bias]) == (4, 2)
    assert step() == (2, 2)
    assert step(decay_var_list=[]) == (1, 2)


@pytest.mark.parametrize(
    ("kind", "argument"), [("AdamW", "beta_1"), ("AdamW", "beta_2"), ("SGDW", "momentum")]
)
def test_keras_takes_no_functions_for_other_arguments(kind, argument):
    made, arguments, expected = KINDS[kind]
    with pytest.raises((TypeError, ValueError)):
        follows(made(weight_decay=D, **{**arguments, argument: lambda: 0.9}), expected, "float32")
