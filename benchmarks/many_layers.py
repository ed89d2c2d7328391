"""What weight dropout costs where there are many weights: operations, first steps, steps, eager calls.

python benchmarks/many_layers.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import measure
import numpy as np
import tensorflow as tf

import tfwd
from tfwd import layers, parametrizations

RATE = 0.3


class NaiveDense(keras.layers.Dense):
    """Ten lines that a user would write: a Dense that drops its kernel."""

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
    """The same around any layer, by the way in which Keras substitutes variables."""

    def build(self, *shapes: Any) -> None:
        super().build(*shapes)
        self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, name="calls")

    def call(self, *inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training:
            return self.layer(*inputs)
        drop, calls = tf.nn.experimental.stateless_dropout, self.calls.value
        dropped = [
            (v, drop(v.value, RATE, tf.stack([i, calls])))
            for i, v in enumerate(self.layer.trainable_variables)
            if len(v.shape) > 1
        ]
        self.calls.assign_add(1)
        with keras.StatelessScope(dropped):
            return self.layer(*inputs)


class Case(NamedTuple):
    """A model to train."""

    model: keras.Model
    x: np.ndarray
    y: np.ndarray


def dense(depth: int, width: int, way: str) -> Case:
    """A chain of Dense layers."""

    def layer(i: int) -> keras.layers.Layer:
        if way == "naive":
            return NaiveDense(width, "relu")
        inner = keras.layers.Dense(width, "relu")
        if way == "plain":
            return inner
        return layers.WeightDropout(inner, RATE, seed=i, recompute=way != "kept")

    model = keras.Sequential([keras.Input((width,)), *map(layer, range(depth))])
    x = np.random.default_rng(0).normal(size=(16, width)).astype("float32")
    return Case(model, x, x)


def lstms(depth: int, width: int, way: str) -> Case:
    """A stack of LSTM layers."""

    def layer(i: int) -> keras.layers.Layer:
        inner = keras.layers.LSTM(width, return_sequences=True)
        if way == "plain":
            return inner
        return layers.WeightDropout(inner, RATE, seed=i) if way == "ours" else Naive(inner)

    model = keras.Sequential([keras.Input((10, width)), *map(layer, range(depth))])
    x = np.random.default_rng(0).normal(size=(8, 10, width)).astype("float32")
    return Case(model, x, x)


def mobilenet(way: str) -> Case:
    """MobileNetV2, every kernel of which is dropped."""
    model = keras.applications.MobileNetV2((64, 64, 3), weights=None, classes=10)
    random = np.random.default_rng(0)
    images = random.normal(size=(8, 64, 64, 3)).astype("float32")
    return Case(model, images, np.eye(10, dtype="float32")[random.integers(0, 10, 8)])


def bert(depth: int, way: str, width: int = 64, words: int = 1000) -> Case:
    """An encoder of BERT layers made of Keras layers."""

    def wrap(layer: keras.layers.Layer) -> keras.layers.Layer:
        if way == "plain":
            return layer
        return layers.WeightDropout(layer, RATE) if way == "ours" else Naive(layer)

    ids = keras.Input((64,), dtype="int32")
    x = wrap(keras.layers.Embedding(words, width))(ids)
    for _ in range(depth):
        attended = wrap(keras.layers.MultiHeadAttention(4, width // 4))(x, x)
        x = keras.layers.LayerNormalization()(x + attended)
        hidden = wrap(keras.layers.Dense(4 * width, "gelu"))(x)
        x = keras.layers.LayerNormalization()(x + wrap(keras.layers.Dense(width))(hidden))
    model = keras.Model(ids, wrap(keras.layers.Dense(words))(x))
    batch = np.random.default_rng(0).integers(0, words, (8, 64))
    return Case(model, batch, np.zeros((8, 64, words), "float32"))


MODELS: dict[str, Callable[[str], Case]] = {
    **{f"dense{n}": (lambda way, n=n: dense(n, 16, way)) for n in (1, 10, 50, 100, 200, 400)},
    "wide20": lambda way: dense(20, 768, way),
    "mobilenet": mobilenet,
    "bert": lambda way: bert(12, way),
    "lstms": lambda way: lstms(8, 64, way),
}


def operations(function: Callable[[], Any]) -> tuple[int, int]:
    """The operations that a function adds to a graph, those of compiled functions apart."""
    graph = tf.function(function, autograph=False).get_concrete_function().graph
    library = {f.signature.name: f for f in graph.as_graph_def().library.function}

    def count(nodes: Any) -> tuple[int, int]:
        plain = compiled = 0
        for node in nodes:
            plain += 1
            name = node.attr["f"].func.name if "f" in node.attr else ""
            if name and name in library:
                inside = count(library[name].node_def)
                if library[name].attr["_XlaMustCompile"].b:
                    compiled += sum(inside)
                else:
                    plain, compiled = plain + inside[0] - 1, compiled + inside[1]
        return plain, compiled

    return count(graph.as_graph_def().node)


def clock(function: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def child(name: str, way: str) -> None:
    measure.equal_threads()
    case = MODELS[name](way)
    model, found = case.model, {}
    if name == "mobilenet" and way == "ours":
        drop = {r".*kernel": parametrizations.Dropout(RATE)}
        start = time.perf_counter()
        model = tfwd.parametrize(model, drop)
        found["parametrize"] = time.perf_counter() - start
    model.compile("sgd", "mse")
    found["first"] = clock(lambda: model.train_on_batch(case.x, case.y))
    for _ in range(3):
        model.train_on_batch(case.x, case.y)
    times = [clock(lambda: model.train_on_batch(case.x, case.y)) for _ in range(20)]
    found["step"] = [statistics.median(t[i] for t in times) for i in (0, 1)]
    x = tf.constant(case.x)

    def forward() -> Any:
        return model(x, training=True)

    def both() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    found["ops"] = [operations(forward), operations(both)]
    for key, function in (("eager", forward), ("eager both", both)):
        function()
        times = [clock(function) for _ in range(7)]
        found[key] = [statistics.median(t[i] for t in times) for i in (0, 1)]
    print(json.dumps(found), flush=True)


def main() -> None:
    name, way = sys.argv[1:3]
    child(name, way)


if __name__ == "__main__":
    main()
