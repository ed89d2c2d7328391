"""Stacks of equal layers that several benchmarks train, each in several ways.

A *kind* is a stack of equal layers with an input. A *way* is the method that changes its weights:

    bare                       no change
    dropout, noise, both       tfwd; `both` is noise, then dropout
    fit                        dropout by tfwd, in the step of model.fit
    naive dropout, ...         TensorFlow's stateless operations on the weight, in a custom layer
    recompute_grad dropout     the same inside tf.recompute_grad

All ways of a kind run the same layers on the same input with the same optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import layers

RATE, STDDEV = 0.5, 0.005
# So small that no model diverges during a measurement.
LEARNING_RATE = 1e-7


class Gated(keras.layers.Layer):
    """A custom layer without a rule in tfwd: `tanh(x A) * sigmoid(x B)`."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units

    def build(self, shape: tuple[int, ...]) -> None:
        self.content = self.add_weight(shape=(shape[-1], self.units), name="content")
        self.gate = self.add_weight(shape=(shape[-1], self.units), name="gate")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        content = tf.matmul(inputs, self.content)
        return tf.tanh(content) * tf.sigmoid(tf.matmul(inputs, self.gate))


@dataclasses.dataclass(frozen=True)
class Kind:
    """A stack of layers and its input.

    Attributes:
        title: Name in tables and plots.
        layer: Function that makes one of the layers.
        depth: Number of layers.
        shape: Shape of the input. Its entries are normal numbers, or ids if `ids` is not 0.
        weights: Names of the parametrized weights, the same as tfwd's default weights.
        ids: Number of different ids of an integer input. Default 0, for a floating input.
    """

    title: str
    layer: Callable[[], keras.layers.Layer]
    depth: int
    shape: tuple[int, ...]
    weights: tuple[str, ...] = ("kernel",)
    ids: int = 0

    def inputs(self) -> tf.Tensor:
        """Returns the input, the same in every process."""
        draw = np.random.default_rng(0)
        if self.ids:
            return tf.constant(draw.integers(self.ids, size=self.shape), tf.int32)
        return tf.constant(draw.normal(size=self.shape), tf.float32)

    def chosen(self, layer: keras.layers.Layer) -> list[bool]:
        """Returns a bool for each trainable weight of the layer: True if it is parametrized."""
        return [v.path.split("/")[-1] in self.weights for v in layer.trainable_variables]


def dense(width: int = 3072, depth: int = 12, batch: int = 64) -> Kind:
    """Returns Dense layers with relu."""

    def layer() -> keras.layers.Layer:
        return keras.layers.Dense(width, activation="relu", kernel_initializer="he_uniform")

    return Kind(f"Dense {width}x{width} + relu, {depth} layers", layer, depth, (batch, width))


def lstm(units: int = 512, time: int = 35, batch: int = 20) -> Kind:
    """Returns one LSTM with an input as wide as its output."""

    def layer() -> keras.layers.Layer:
        return keras.layers.LSTM(units, return_sequences=True)

    return Kind(f"LSTM {units}, time {time}", layer, 1, (batch, time, units), ("recurrent_kernel",))


KINDS: dict[str, Kind] = {
    "dense": dense(),
    "conv": Kind(
        "Conv2D 3x3, 512 to 512, 8 layers",
        lambda: keras.layers.Conv2D(512, 3, padding="same", activation="relu"),
        8,
        (8, 8, 8, 512),
    ),
    "einsum": Kind(
        "EinsumDense 2048 to 2048, 8 layers",
        lambda: keras.layers.EinsumDense("btd,de->bte", (None, 2048), bias_axes="e"),
        8,
        (8, 8, 2048),
    ),
    "embedding": Kind(
        "Embedding 200,000 x 256",
        lambda: keras.layers.Embedding(200_000, 256),
        1,
        (20, 70),
        ("embeddings",),
        ids=200_000,
    ),
    "attention": Kind(
        "MultiHeadAttention 16 x 64, width 1024, 6 layers",
        lambda: keras.layers.MultiHeadAttention(16, 64),
        6,
        (4, 32, 1024),
    ),
    "gru": Kind(
        "GRU 1024, 4 layers, time 20",
        lambda: keras.layers.GRU(1024, return_sequences=True),
        4,
        (20, 20, 1024),
        ("recurrent_kernel",),
    ),
    "user": Kind(
        "a user's layer, two 2048x2048, 6 layers",
        lambda: Gated(2048),
        6,
        (64, 2048),
        ("content", "gate"),
    ),
}


def _naive(weight: tf.Tensor, seed: tf.Tensor, noise: bool, drop: bool) -> tf.Tensor:
    if noise:
        draw = tf.random.stateless_normal(tf.shape(weight), seed + 1, dtype=weight.dtype)
        weight = weight + STDDEV * draw
    if drop:
        weight = tf.nn.experimental.stateless_dropout(weight, RATE, seed)
    return weight


class Naive(keras.layers.Layer):
    """A wrapper that runs a layer on weights with noise or dropout of TensorFlow's own operations.

    Args:
        layer: Built layer.
        chosen: A bool for each trainable weight. True if the weight is changed.
        noise: bool. Adds noise.
        drop: bool. Applies dropout.
        recompute: bool. Runs the layer inside `tf.recompute_grad`.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        chosen: list[bool],
        noise: bool,
        drop: bool,
        recompute: bool,
    ) -> None:
        super().__init__()
        self.layer, self.chosen, self.recompute = layer, chosen, recompute
        self.noise, self.drop = noise, drop
        self.seed = self.add_weight(
            shape=(2,), dtype="int32", initializer="zeros", trainable=False, autocast=False
        )
        self.built = True

    def call(self, *inputs: tf.Tensor) -> tf.Tensor:
        seed = tf.convert_to_tensor(self.seed) + 0
        self.seed.assign_add([0, 2])
        weights = [tf.convert_to_tensor(v) for v in self.layer.trainable_variables]
        run = tf.recompute_grad(self._run) if self.recompute else self._run
        return run(seed, *weights, *inputs)

    def _run(self, seed: tf.Tensor, *arguments: tf.Tensor) -> tf.Tensor:
        count = len(self.chosen)
        weights = [
            _naive(weight, seed + tf.constant([place, 0]), self.noise, self.drop)
            if chosen
            else weight
            for place, (weight, chosen) in enumerate(
                zip(arguments[:count], self.chosen, strict=True)
            )
        ]
        fixed = [tf.convert_to_tensor(v) for v in self.layer.non_trainable_variables]
        outputs, _ = self.layer.stateless_call(weights, fixed, *arguments[count:])
        return outputs


def perturbed(way: str, layer: keras.layers.Layer, chosen: list[bool], seed: int) -> Any:
    """Returns the built layer with its weights changed in the given way."""
    if way == "bare":
        return layer
    noise, drop = "noise" in way or "both" in way, "noise" not in way
    if way.startswith(("naive", "recompute_grad")):
        return Naive(layer, chosen, noise, drop, way.startswith("recompute_grad"))
    if way == "dropout" and isinstance(layer, keras.layers.LSTM):
        fast = layers.WeightDropLSTM(layer.units, RATE, seed=seed, return_sequences=True)
        fast.build((None, None, layer.trainable_variables[0].shape[0]))
        fast.set_weights(layer.get_weights())
        return fast
    if noise:
        layer = layers.VariationalNoise(layer, STDDEV, seed=seed)
    if drop:
        layer = layers.WeightDropout(layer, RATE, seed=seed + 1)
    return layer


class Stack(keras.Model):
    """The layers of a kind, one after the other."""

    def __init__(self, kind: Kind, way: str) -> None:
        super().__init__()
        keras.utils.set_random_seed(0)
        self.attends = False
        values = kind.inputs()
        self.stack: list[keras.layers.Layer] = []
        self.dropped_bytes = 0
        for place in range(kind.depth):
            layer = kind.layer()
            self.attends = isinstance(layer, keras.layers.MultiHeadAttention)
            values = self.apply(layer, values)
            chosen = kind.chosen(layer)
            self.dropped_bytes += sum(
                4 * int(np.prod(v.shape))
                for v, yes in zip(layer.trainable_variables, chosen, strict=True)
                if yes
            )
            self.stack.append(perturbed(way, layer, chosen, 10 * place))

    def apply(self, layer: keras.layers.Layer, values: tf.Tensor, **kwargs: Any) -> tf.Tensor:
        """Calls one of the layers; attention gets its input as query and as value."""
        return layer(values, values, **kwargs) if self.attends else layer(values, **kwargs)

    def call(self, values: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        for layer in self.stack:
            # Plain layers without dropout, and `Naive`, have no training argument.
            takes = isinstance(layer, layers.Parametrized | layers.WeightDropLSTM)
            values = self.apply(layer, values, **({"training": training} if takes else {}))
        return values


def train_step(kind: Kind | str, way: str) -> Callable[[], Any]:
    """Returns a training step as users write it: a `tf.function` with a tape, and SGD.

    Returns:
        A function that runs one step, waits for it, and returns the loss. Its attribute
        `dropped_bytes` is the size of the changed weights.
    """
    kind = KINDS[kind] if isinstance(kind, str) else kind
    model, inputs = Stack(kind, "dropout" if way == "fit" else way), kind.inputs()
    optimizer = keras.optimizers.SGD(LEARNING_RATE)
    if way == "fit":
        model.compile(optimizer, loss=lambda _, y: tf.square(y))
        target = tf.zeros(kind.shape)
        run = lambda: model.train_on_batch(inputs, target)  # noqa: E731
    else:
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(values: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(values, training=True)))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        run = lambda: step(inputs).numpy()  # noqa: E731
    return Step(run, model.dropped_bytes)


@dataclasses.dataclass
class Step:
    """A step that can be called, and the size of the weights that it changes."""

    run: Callable[[], Any]
    dropped_bytes: int

    def __call__(self) -> Any:
        return self.run()
