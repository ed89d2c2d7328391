"""Models, batches and tfwd's runs for the benchmarks of gradient moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfwd import gradients, layers

L = keras.layers
RANDOM = np.random.default_rng(0)


class Case(NamedTuple):
    """A model, and the inputs and classes of a batch."""

    model: keras.Model
    x: np.ndarray
    y: np.ndarray


def floats(*shape: int) -> np.ndarray:
    """Returns random inputs."""
    return RANDOM.normal(size=shape).astype("float32")


def ids(count: int, *shape: int) -> np.ndarray:
    """Returns random word ids or classes."""
    return RANDOM.integers(0, count, size=shape).astype("int32")


def mlp(widths: list[int], batch: int) -> Case:
    """Returns Dense layers with ten classes."""
    hidden = [L.Dense(width, "relu") for width in widths[1:]]
    stack = [keras.Input((widths[0],)), *hidden, L.Dense(10)]
    return Case(keras.Sequential(stack), floats(batch, widths[0]), ids(10, batch))


def sequence() -> Case:
    """Returns Dense layers at each of many positions."""
    stack = [keras.Input((64, 128)), L.Dense(256, "relu"), L.Dense(256, "relu"), L.Dense(10)]
    return Case(keras.Sequential(stack), floats(32, 64, 128), ids(10, 32, 64))


def convolutions() -> Case:
    """Returns two convolutions on small images."""
    options = {"padding": "same", "activation": "relu"}
    stack = [L.Conv2D(32, 3, **options), L.Conv2D(64, 3, **options), L.GlobalAveragePooling2D()]
    model = keras.Sequential([keras.Input((32, 32, 3)), *stack, L.Dense(10)])
    return Case(model, floats(32, 32, 32, 3), ids(10, 32))


def embedding() -> Case:
    """Returns an embedding with a class at each position."""
    stack = [keras.Input((32,), dtype="int32"), L.Embedding(2000, 64), L.Dense(10)]
    return Case(keras.Sequential(stack), ids(2000, 64, 32), ids(10, 64, 32))


def lstm() -> Case:
    """Returns one recurrent layer."""
    stack = [keras.Input((32, 64)), L.LSTM(128), L.Dense(10)]
    return Case(keras.Sequential(stack), floats(16, 32, 64), ids(10, 16))


def language_model() -> Case:
    """Returns the quickstart's layers.

    They are an embedding of 4,522 words and LSTMs of 256 and 128. The softmax is tied to the
    embedding.
    """
    table = L.Embedding(4522, 128)
    lstms = [L.LSTM(units, return_sequences=True) for units in (256, 128)]
    stack = [keras.Input((35,), dtype="int32"), table, *lstms, layers.TiedDense(table)]
    return Case(keras.Sequential(stack), ids(4522, 32, 35), ids(4522, 32, 35))


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: mlp([784, 512, 512], 256),
    "wide": lambda: mlp([1024] * 5, 256),
    "sequence": sequence,
    "conv": convolutions,
    "embedding": embedding,
    "lstm": lstm,
    "lm": language_model,
}


def ours(case: Case) -> dict[str, Callable[[], Any]]:
    """Returns a run of a plain gradient, named `plain`, and a run of both moments, named `tfwd`."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model, given = case.model, (tf.constant(case.x), tf.constant(case.y))

    @tf.function
    def plain(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            value = loss(y, model(x))
        found = tape.gradient(value, [v.value for v in model.trainable_variables])
        return [tf.convert_to_tensor(gradient) for gradient in found]

    @tf.function
    def moments(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        found = gradients.moments(model, x, y, loss)
        return [*found.mean, *found.mean_square]

    return {
        "plain": lambda: plain(*given)[-1].numpy(),
        "tfwd": lambda: moments(*given)[-1].numpy(),
    }
