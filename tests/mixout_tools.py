"""Layers and a model with `Mixout`, their parts, and effective weights by the paper's formula."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras, layers
from tfwd import parametrizations as P

X = tf.random.stateless_normal([3, 5], [1, 2])

RATE = 0.25


def dense(units: int = 4, **options: Any) -> layers.Mixout:
    """Returns a layer after its first call, whose kernel has changed since."""
    layer = layers.Mixout(keras.layers.Dense(units), RATE, seed=7, **options)
    layer(X, training=True)
    move(layer)
    return layer


def move(layer: Any, seed: int = 3) -> None:
    for weight in layer.weights:
        shift = tf.random.stateless_normal(weight.shape, [seed, 4])
        weight.assign_add(tf.cast(shift, _keras.variables.dtype_name(weight)))


def kernel(layer: Any) -> np.ndarray:
    return np.array(_keras.variables.value(layer.weights[0]))


def bias(layer: Any) -> np.ndarray:
    return np.array(_keras.variables.value(layer.weights[1]))


def reference(layer: Any) -> np.ndarray:
    (found,) = layer.references.all()
    return np.array(tf.cast(tf.convert_to_tensor(found), tf.float32))


def kept(layer: Any, call: int, noise_shape: tuple | None = None) -> np.ndarray:
    """Returns the mask of a training call, drawn as for weight dropout."""
    (seed,) = layer.draws.seeds_of_call(call, [0])
    return (
        P.Dropout(RATE, noise_shape=noise_shape)(tf.ones(layer.weights[0].shape), seed).numpy() != 0
    )


def published(layer: Any, start: np.ndarray, call: int, **options: Any) -> np.ndarray:
    """Returns the effective weight by the paper's formula."""
    m, now = kept(layer, call, **options), kernel(layer).astype(np.float64)
    return ((1 - m) * start + m * now - RATE * start) / (1 - RATE)


# The formula.


def trained(folder: Any = None) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Mixout(
                keras.layers.Dense(4, name="a"), RATE, seed=1, reference_dtype="bfloat16"
            ),
            layers.Mixout(keras.layers.Dense(1, name="b"), RATE, seed=2),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model
