"""Table of every optimizer of keras.optimizers, with arguments that turn off its decay."""

import inspect
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras

# Older releases of Keras have no Muon, or a Muon with one decay.
MUON = getattr(keras.optimizers, "Muon", None)
MUON_HAS_TWO_DECAYS = bool(MUON) and "adam_weight_decay" in inspect.signature(MUON).parameters
# Optimizers that decay by default need an argument that turns decay off.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.0},
    "Muon": {"weight_decay": 0.0, "adam_weight_decay": 0.0},
}
WRAPPERS = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
NAMES = sorted(
    name
    for name, found in vars(keras.optimizers).items()
    if inspect.isclass(found)
    and issubclass(found, keras.optimizers.Optimizer)
    and name not in WRAPPERS
    and (name != "Muon" or MUON_HAS_TWO_DECAYS)  # with one decay it does not run on TensorFlow
)
tf_variable = _keras.variables.tf_variable
HAS_MULTI = hasattr(keras.optimizers, "MultiOptimizer")


def make(name: str, learning_rate: Any = 0.1, **options: Any) -> keras.optimizers.Optimizer:
    """Returns the optimizer of that name, without decay of its own."""
    arguments = {**ARGUMENTS.get(name, {}), **options}
    if name == "Multi":
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(
                make("SGD", learning_rate), {".*bias": make("Adam", learning_rate)}
            )
        )
    return getattr(keras.optimizers, name)(learning_rate=learning_rate, **arguments)


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


X = np.random.default_rng(7).normal(size=(12, 4)).astype("float32")
Y = np.random.default_rng(8).normal(size=(12, 1)).astype("float32")


def fit(model: keras.Model, **options: Any) -> keras.callbacks.History:
    """Fits with three steps per epoch, in the same order each time."""
    options = {"epochs": 1, "batch_size": 4, "verbose": 0, "shuffle": False, **options}
    return model.fit(X, Y, **options)


LossScale = keras.optimizers.LossScaleOptimizer


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
