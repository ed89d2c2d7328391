"""Layers of Keras 2 that differ from Keras 3's: by a rule, or the general way."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradients.brute_force import assert_moments, general, per_example, randomized
from stack_marks import needs_addons

from tfwd import gradients

L = keras.layers
pytestmark = needs_addons

# Layers, the shape of an example, and whether they have a rule.
CASES: dict[str, tuple[Callable[[], Any], tuple[int, ...], bool]] = {
    "unrolled": (lambda: L.LSTM(3, unroll=True), (4, 3), True),
    "dilated_transposed": (lambda: L.Conv2DTranspose(2, 3, dilation_rate=2), (4, 4, 3), False),
    "transposed_padded": (
        lambda: L.Conv2DTranspose(2, 3, strides=2, output_padding=1, padding="same"),
        (4, 4, 3),
        True,
    ),
    "transposed_first": (
        lambda: L.Conv2DTranspose(2, 3, data_format="channels_first"),
        (3, 4, 4),
        True,
    ),
    "depthwise_first": (
        lambda: L.DepthwiseConv2D(3, data_format="channels_first"),
        (3, 5, 5),
        True,
    ),
    "separable_causal": (lambda: L.SeparableConv1D(2, 3, padding="causal"), (6, 3), False),
    "several_axes_of_examples": (lambda: L.Conv1D(2, 3), (2, 6, 3), False),
}


@pytest.fixture(autouse=True)
def float64() -> None:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def check(model: keras.Model, x: Any, ruled: bool) -> None:
    y = np.random.default_rng(2).normal(size=model(x).shape)
    moments = gradients.moments(randomized(model), x, y, "mse")
    assert general(moments) != ruled
    assert_moments(moments, per_example(model, x, y))


@pytest.mark.parametrize("name", CASES)
def test_layer(name: str) -> None:
    make, shape, ruled = CASES[name]
    x = np.random.default_rng(1).normal(size=(3, *shape))
    check(keras.Sequential([keras.Input(shape), make(), L.Dense(2)]), x, ruled)


def test_time_first() -> None:
    inputs = keras.Input((4, 3))
    turned = tf.transpose(inputs, [1, 0, 2])
    found = L.LSTM(3, time_major=True, return_sequences=True)(turned)
    outputs = L.Dense(2)(tf.transpose(found, [1, 0, 2]))
    check(keras.Model(inputs, outputs), np.random.default_rng(1).normal(size=(3, 4, 3)), False)


def test_integers_into_a_dense_layer() -> None:
    inputs = keras.Input((3,), dtype="int32")
    model = keras.Model(inputs, L.Dense(2)(inputs))
    check(model, np.random.default_rng(1).integers(0, 5, (4, 3)), True)


def test_ragged_sequences() -> None:
    ids = tf.ragged.constant([[1, 2, 3], [4], [1, 1], [2, 3]])
    inputs = keras.Input((None,), ragged=True, dtype="int32")
    model = keras.Model(inputs, L.Dense(2)(L.LSTM(3)(L.Embedding(6, 3)(inputs))))
    y = np.random.default_rng(2).normal(size=(4, 2))
    moments = gradients.moments(randomized(model), ids, y, "mse")
    rows = []
    for b in range(4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids[b : b + 1]) - y[b : b + 1]) ** 2)
        rows.append([tf.convert_to_tensor(g) for g in tape.gradient(loss, model.weights)])
    assert_moments(moments, [np.stack(parts) for parts in zip(*rows, strict=True)])


class Branches(keras.Model):
    """A layer whose `call` needs AutoGraph in a function. Keras 2 applies AutoGraph to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = L.Dense(3), L.Dense(2)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        hidden = self.first(x)
        if tf.reduce_sum(tf.ones([2])) > 1:
            hidden = 2 * hidden
        return self.second(hidden)


class BranchingScale(L.Layer):
    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(name="scale", shape=(shape[-1],), initializer="ones")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        if tf.reduce_sum(tf.ones([2])) > 1:
            x = tf.sin(x * self.scale)
        return x


@pytest.mark.parametrize("ruled", [False, True])
@pytest.mark.parametrize(
    "make", [Branches, lambda: keras.Sequential([BranchingScale(), L.Dense(2)])]
)
def test_code_that_autograph_rewrites(make: Callable, ruled: bool) -> None:
    random = np.random.default_rng(1)
    model, x, y = make(), random.normal(size=(4, 3)), random.normal(size=(4, 2))
    model(x)
    if ruled:  # so that the layer's call is replaced during a pass
        gradients.rule(BranchingScale)(lambda layer, call, x: NotImplemented)

    @tf.function
    def run(x: tf.Tensor, y: tf.Tensor) -> Any:
        moments = gradients.moments(randomized_model, x, y, "mse")
        methods[:] = moments.methods
        return moments.mean, moments.mean_square

    methods: list[str] = []
    randomized_model = randomized(model)
    try:
        found = run(tf.constant(x), tf.constant(y))
    finally:
        gradients.rules.registry._rules.pop(BranchingScale, None)
    assert_moments(gradients.Moments(*found, methods, 4), per_example(model, x, y))


def addons(kind: str) -> keras.Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its development has ended
        import tensorflow_addons as tfa
    inputs = keras.Input((4, 3))
    if kind == "weight_normalization":
        found = tfa.layers.WeightNormalization(L.Dense(3))(inputs)
    elif kind == "attention":
        found = tfa.layers.MultiHeadAttention(2, 2)([inputs, inputs])
    elif kind == "instance_normalization":
        found = tfa.layers.InstanceNormalization()(inputs)
    else:
        found = L.RNN(getattr(tfa.rnn, kind)(3), return_sequences=True)(inputs)
    return keras.Model(inputs, L.Dense(2)(found))


KINDS = ["attention", "instance_normalization", "LayerNormLSTMCell", "NASCell", "PeepholeLSTMCell"]


@pytest.mark.filterwarnings("ignore:The initializer GlorotUniform is unseeded")
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_tensorflow_addons(kind: str) -> None:
    check(addons(kind), np.random.default_rng(1).normal(size=(3, 4, 3)), False)


def test_weight_normalization_of_tensorflow_addons() -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    model = randomized(addons("weight_normalization"))
    x, y = (np.random.default_rng(1).normal(size=(3, 4, n)).astype("f") for n in (3, 2))
    with pytest.raises(ValueError, match="its examples depend on each other"):
        gradients.moments(model, x, y, "mse")  # the first call takes its scale from the batch
    model(x)
    moments = gradients.moments(model, x, y, "mse")
    assert moments.methods[-2:] == ["dense", "dense"]
    assert_moments(moments, per_example(model, x, y), 1e-4)
