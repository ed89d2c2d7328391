"""Models with many layers: without dropout, with tfwd, and with a naive custom layer.

The models are chains of Dense layers, stacks of LSTMs, MobileNetV2 and BERT. many_layers.py and
known_models.py measure `MODELS`. in_place_cost.py and mask_and_recompute_thresholds.py use some of
the models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfwd
from common.many_layers_measurements import RATE
from tfwd import layers, parametrizations

Made = tuple[keras.Model, Any, Any]


class NaiveDense(keras.layers.Dense):
    """A Dense that drops its kernel, with a counter in the seed."""

    def build(self, shape: tuple[int, ...]) -> None:
        super().build(shape)
        self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, name="calls")

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        kernel = tf.convert_to_tensor(self.kernel)
        if training:
            seed = tf.stack([7, self.calls.value])
            kernel = tf.nn.experimental.stateless_dropout(kernel, RATE, seed)
            self.calls.assign_add(1)
        return self.activation(tf.matmul(inputs, kernel) + self.bias)


class Naive(keras.layers.Wrapper):
    """A wrapper that runs a layer on dropped weights, with `keras.StatelessScope`."""

    def build(self, *shapes: Any) -> None:
        self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, name="calls")

    def call(self, *inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training:
            return self.layer(*inputs)
        drop, calls = tf.nn.experimental.stateless_dropout, self.calls.value
        dropped = [
            (v, drop(v.value, RATE, tf.stack([i, calls])))
            for i, v in enumerate(self.layer.trainable_variables)
            if v.path.endswith("recurrent_kernel" if "lstm" in v.path else ("kernel", "embeddings"))
        ]
        self.calls.assign_add(1)
        with keras.StatelessScope(dropped):
            return self.layer(*inputs)


def wrap(layer: keras.layers.Layer, side: str) -> keras.layers.Layer:
    """Returns the layer as a side uses it."""
    if side == "plain":
        return layer
    return layers.WeightDropout(layer, RATE) if side == "tfwd" else Naive(layer)


def dense(depth: int, width: int, side: str) -> Made:
    """Returns a chain of Dense layers."""

    def layer() -> keras.layers.Layer:
        if side == "naive":
            return NaiveDense(width, "relu")
        return wrap(keras.layers.Dense(width, "relu"), side)

    model = keras.Sequential([keras.Input((width,)), *(layer() for _ in range(depth))])
    x = np.random.default_rng(0).normal(size=(16, width)).astype("float32")
    return model, x, x


def lstms(depth: int, width: int, side: str) -> Made:
    """Returns a stack of LSTM layers."""
    stack = [keras.layers.LSTM(width, return_sequences=True) for _ in range(depth)]
    model = keras.Sequential([keras.Input((10, width)), *(wrap(layer, side) for layer in stack)])
    x = np.random.default_rng(0).normal(size=(8, 10, width)).astype("float32")
    return model, x, x


def mobilenet(side: str) -> Made:
    """Returns MobileNetV2. On tfwd's side, `tfwd.parametrize` drops every kernel."""
    model = keras.applications.MobileNetV2((64, 64, 3), weights=None, classes=10)
    if side == "tfwd":
        model = tfwd.parametrize(model, {r".*kernel": parametrizations.Dropout(RATE)})
    random = np.random.default_rng(0)
    images = random.normal(size=(8, 64, 64, 3)).astype("float32")
    return model, images, np.eye(10, dtype="float32")[random.integers(0, 10, 8)]


def bert(depth: int, side: str, width: int = 64, words: int = 1000) -> Made:
    """Returns an encoder of BERT layers made of Keras layers."""
    ids = keras.Input((64,), dtype="int32")
    x = wrap(keras.layers.Embedding(words, width), side)(ids)
    for _ in range(depth):
        attended = wrap(keras.layers.MultiHeadAttention(4, width // 4), side)(x, x)
        x = keras.layers.LayerNormalization()(x + attended)
        hidden = wrap(keras.layers.Dense(4 * width, "gelu"), side)(x)
        x = keras.layers.LayerNormalization()(x + wrap(keras.layers.Dense(width), side)(hidden))
    model = keras.Model(ids, wrap(keras.layers.Dense(words), side)(x))
    batch = np.random.default_rng(0).integers(0, words, (8, 64))
    return model, batch, np.zeros((8, 64, words), "float32")


MODELS: dict[str, Callable[[str], Made]] = {
    "dense16": functools.partial(dense, 100, 16),
    "dense768": functools.partial(dense, 20, 768),
    "MobileNetV2": mobilenet,
    "BERT": functools.partial(bert, 12),
    "LSTMs": functools.partial(lstms, 8, 64),
}
