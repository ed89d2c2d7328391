"""The moments by their definition: one example after the other, each alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras, gradients
from tfwd.layers._substitution.weight_perturbation_mixin import WeightPerturbationMixin

MSE = keras.losses.MeanSquaredError
# Keras 2's losses compute in the dtype that they are given.
MSE64 = MSE() if _keras.IS_KERAS_2 else MSE(dtype="float64")


def general_method() -> str:
    """Returns the general way for a weight that only Keras's Dense computes with, on 3-D inputs.

    In some releases of Keras, Dense is a batched product, and `vectorized_map` of it can fail.
    """
    layer = keras.layers.Dense(2)
    layer.build((None, 3, 4))
    graph = tf.function(layer).get_concrete_function(tf.TensorSpec([2, 3, 4])).graph
    batched = any("BatchMatMul" in operation.type for operation in graph.get_operations())
    return "loop" if batched else "vectorized_map"


def per_example(model: keras.Model, x: Any, y: Any, loss: Any = None, **kwargs: Any) -> list:
    """Returns the gradients `[B, *shape]` of `loss` for each weight.

    Each example is a batch of one.
    """
    loss = loss or MSE64
    rows = []
    for b in range(len(tf.nest.flatten(y)[0])):
        one = tf.nest.map_structure(lambda t, b=b: tf.convert_to_tensor(t[b : b + 1]), (x, y))
        with tf.GradientTape() as tape:
            value = loss(one[1], model(one[0], **kwargs))
        found = tape.gradient(
            value,
            [_keras.variables.tf_variable(v) for v in model.trainable_variables],
            unconnected_gradients="zero",
        )
        rows.append([np.asarray(tf.convert_to_tensor(g), np.float64) for g in found])
    return [np.stack(parts) for parts in zip(*rows, strict=True)]


def assert_moments(moments: gradients.Moments, rows: list, tolerance: float = 1e-9) -> None:
    """Asserts that the moments are the moments of these per-example gradients."""
    for mean, squares, row in zip(moments.mean, moments.mean_square, rows, strict=True):
        for found, wanted in ((mean, row.mean(0)), (squares, (row**2).mean(0))):
            scale = np.abs(wanted).max() + 1e-30
            np.testing.assert_allclose(
                found, wanted, rtol=tolerance, atol=tolerance * scale + 1e-15
            )


def general(moments: gradients.Moments) -> bool:
    """Checks whether any weight was computed the general way."""
    return any(m in ("vectorized_map", "loop", "backward_each") for m in moments.methods)


def randomized(model: keras.Model, seed: int = 0) -> keras.Model:
    """Returns the model with no weight at a special value, such as a bias at 0."""
    random = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(np.asarray(variable) + 0.2 * random.normal(size=variable.shape))
    return model


def states(model: keras.Model) -> list:
    """Returns the variables that determine the model's next draws."""
    seeded = [
        layer
        for layer in _keras.layers.all_layers(model)
        if isinstance(layer, WeightPerturbationMixin)
    ]
    return [*model.non_trainable_variables, *(layer.draws.generator.state for layer in seeded)]


def rewinding(model: keras.Model) -> Callable[[], None]:
    """Returns a function that makes the model draw again as from here on."""
    generators = [
        g for layer in _keras.layers.all_layers(model) if (g := _generator(layer)) is not None
    ]
    numbers = [generator._seed for generator in generators]
    before = [variable.numpy() for variable in states(model)]

    def rewind() -> None:
        for variable, value in zip(states(model), before, strict=True):
            variable.assign(value)
        for generator, number in zip(generators, numbers, strict=True):
            generator._seed = number
        tf.random.set_seed(0)  # operations with states start from their first state

    tf.random.set_seed(0)
    return rewind


def _generator(layer: Any) -> Any:
    """Returns the generator of a Keras 2 layer, which is no variable."""
    return getattr(layer, "_random_generator", None) if _keras.IS_KERAS_2 else None
