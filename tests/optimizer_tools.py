"""Tools of the tests of optimizers: variables, gradients, a model and its data, and triggers."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras

tf_variable = _keras.variables.tf_variable
LossScale = keras.optimizers.LossScaleOptimizer
X = np.random.default_rng(7).normal(size=(12, 4)).astype("float32")
Y = np.random.default_rng(8).normal(size=(12, 1)).astype("float32")


def variables(dtype: str = "float64") -> list[keras.Variable]:
    """Returns a matrix and a vector, the same each time."""
    rng = np.random.default_rng(0)
    return [
        keras.Variable(rng.normal(size=(3, 2)), dtype=dtype, name="kernel"),
        keras.Variable(rng.normal(size=2), dtype=dtype, name="bias"),
    ]


def gradients(step: int, dtype: str = "float64") -> list[tf.Tensor]:
    """Returns the gradients of a step, the same each time."""
    rng = np.random.default_rng(step + 1)
    return [tf.constant(rng.normal(size=shape), dtype) for shape in ((3, 2), (2,))]


def values(variables: list[Any]) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """Asserts that values are equal bit for bit."""
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def model(dtype: str | None = None) -> keras.Model:
    """Returns a small model, the same each time."""
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, activation="tanh", name="hidden", dtype=dtype),
            keras.layers.Dense(1, name="out", dtype=dtype),
        ],
        name="m",
    )


def fit(model: keras.Model, **options: Any) -> keras.callbacks.History:
    """Fits with three steps per epoch, in the same order each time."""
    options = {"epochs": 1, "batch_size": 4, "verbose": 0, "shuffle": False, **options}
    return model.fit(X, Y, **options)


def trigger(optimizer: Any) -> None:
    """Makes an averaging optimizer begin."""
    for loss in [1.0] * (optimizer.non_monotone_interval + 1):
        optimizer.observe(loss)
    assert optimizer.observe(2.0) and optimizer.triggered


def triggered_at(losses: list[float], n: int) -> int | None:
    """Returns the trigger's epoch by the authors' rule: compares before the loss is appended."""
    before = []
    for t, loss in enumerate(losses):
        if len(before) > n and loss > min(before[:-n]):
            return t
        before.append(loss)
    return None
