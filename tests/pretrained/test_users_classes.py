"""Weights of users' classes that are derived from Keras's layers.

The oracle is the formula of each class in NumPy, with PyTorch's tensors.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved
from stack_marks import needs_keras3

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers
X = RNG.normal(size=(2, 4)).astype("float32")
IDS = np.array([[3, 1], [0, 2]])


class ProjectedEmbedding(layers.Embedding):
    """A table with a projection, as in factorized embeddings."""

    def build(self, shape=None):
        super().build(shape)
        self.projection = self.add_weight(name="projection", shape=(4, 4))

    def call(self, ids):
        return super().call(ids) @ self.projection


class Table(layers.Layer):
    """A table of entries in columns, as in Keras's example of a VQ-VAE."""

    def build(self, shape):
        self.embeddings = self.add_weight(name="embeddings", shape=(4, 4))

    def call(self, ids):
        return tf.gather(tf.transpose(self.embeddings), ids)


class ScaledBatchNormalization(layers.BatchNormalization):
    """A normalization with a matrix."""

    def build(self, shape):
        super().build(shape)
        self.mixing = self.add_weight(name="mixing", shape=(4, 4))

    def call(self, x, **kwargs):
        return super().call(x, **kwargs) @ self.mixing


class OutputsFirst(layers.Dense):
    """A dense layer that makes its own kernel, with the outputs first."""

    def build(self, shape):
        self.matrix = self.add_weight(name="kernel", shape=(self.units, shape[-1]))
        self.built = True

    def call(self, x):
        return x @ tf.transpose(self.matrix)


class TorchGates(layers.GRUCell):
    """A cell that divides its kernels into gates by itself."""

    def call(self, x, states, training=None):
        h = states[0]
        reset, update, new = tf.split(x @ self.kernel, 3, -1)
        kept = tf.split(h @ self.recurrent_kernel, 3, -1)
        reset, update = tf.sigmoid(reset + kept[0]), tf.sigmoid(update + kept[1])
        h = (1 - update) * tf.tanh(new + reset * kept[2]) + update * h
        return h, [h]


class OwnLSTM(layers.LSTMCell):
    """A cell that divides its kernels into gates by itself: output, forget, cell, input."""

    def call(self, x, states, training=None):
        h, c = states
        output, forget, new, given = tf.split(
            x @ self.kernel + h @ self.recurrent_kernel + self.bias, 4, -1
        )
        c = tf.sigmoid(forget) * c + tf.sigmoid(given) * tf.tanh(new)
        h = tf.sigmoid(output) * tf.tanh(c)
        return h, [h, c]


class FromTheOtherSide(layers.Dense):
    """A dense layer whose own `call` multiplies by the transposed kernel."""

    def call(self, x):
        return x @ tf.transpose(self.kernel)


class FromAllWeights(layers.Dense):
    """A dense layer whose own `call` does not name the weights."""

    def call(self, x):
        kernel, bias = self.weights
        return x @ tf.transpose(kernel) + bias


class ScaledGates(layers.GRUCell):
    """A cell with a factor for each entry of each gate."""

    def build(self, shape):
        super().build(shape)
        self.scale = self.add_weight(name="scale", shape=(12,))

    def call(self, x, states, training=None):
        return super().call(x * self.scale[:4], states)


def ids_of(layer):
    return layer, IDS


def rows_of(layer):
    return layer, X


def steps_of(cell):
    return layers.RNN(cell, name="r"), X[:, None]


SQUARE = {
    "a projection beside a table": lambda: ids_of(ProjectedEmbedding(4, 4, name="r")),
    "a table with entries in columns": lambda: ids_of(Table(name="r")),
    "a matrix of a normalization": lambda: rows_of(ScaledBatchNormalization(name="r")),
    "a kernel of the user": lambda: rows_of(OutputsFirst(4, use_bias=False, name="r")),
    "gates of the user": lambda: steps_of(TorchGates(4, use_bias=False)),
    "gates of the user in an LSTM": lambda: steps_of(OwnLSTM(4)),
    "a kernel that the user transposes": lambda: rows_of(
        FromTheOtherSide(4, use_bias=False, name="r")
    ),
    "a kernel without its name": lambda: rows_of(FromAllWeights(4, name="r")),
    "a vector of gates": lambda: steps_of(ScaledGates(4, use_bias=False)),
}


@pytest.mark.parametrize("name", SQUARE)
def test_an_order_of_axes_that_the_class_does_not_show(name, tmp_path):
    """Checks that the layout is demanded for these weights, and loads with it."""
    layer, x = SQUARE[name]()
    before = layer(x)
    own = {f"w{i}": v.numpy() for i, v in enumerate(layer.weights)}
    files = {f"{key}.weight": value.T for key, value in own.items()}
    paths = [getattr(v, "path", v.name.partition(":")[0]) for v in layer.weights]
    names = [f"(.*/)?{path.rpartition('/')[2]}" for path in paths]
    keys = {pattern: f"w{i}.weight" for i, pattern in enumerate(names)}
    with pytest.raises(PlanError, match="does not know PyTorch's order|in another order"):
        load(layer, saved(tmp_path, files), mapping=keys)
    given = {pattern: Key(f"w{i}", transposed=False) for i, pattern in enumerate(names)}
    load(layer, saved(tmp_path, own), mapping=given)
    np.testing.assert_array_equal(layer(x), before)


@needs_keras3("enable_lora")
def test_low_rank_matrices_of_a_table(tmp_path):
    """Checks a square matrix that Keras adds beside an embedding."""
    layer = layers.Embedding(4, 4, name="e")
    layer.build()
    layer.enable_lora(4)
    files = {f"e.{name}": np.eye(4) for name in ("weight", "a", "b")}
    keys = {"embeddings": "e.weight", "lora_embeddings_a": "e.a", "lora_embeddings_b": "e.b"}
    with pytest.raises(PlanError, match="'lora_embeddings_b' belongs to a Embedding"):
        load(layer, saved(tmp_path, files), mapping=keys)


class Standardized(layers.Conv2D):
    """A convolution with a kernel of Keras that `call` changes."""

    def build(self, shape):
        super().build(shape)
        self.gain = self.add_weight(name="gain", shape=(self.kernel.shape[-1],))

    def call(self, x):
        return tf.nn.conv2d(x, 2 * self.kernel * self.gain, 1, "VALID")


def test_a_kernel_of_keras_in_a_class_of_the_user(tmp_path):
    """Checks that a kernel made by Keras's `build` has Keras's axes in any `call`."""
    image = RNG.normal(size=(2, 1, 1, 3)).astype("float32")
    layer = Standardized(3, 1, use_bias=False, name="c")
    layer(image)
    kernel, gain = RNG.normal(size=(3, 3, 1, 1)), RNG.normal(size=3)
    folder = saved(tmp_path, {"c.weight": kernel, "c.gain": gain})
    load(layer, folder, mapping={"kernel": "c.weight", "gain": "c.gain"})
    expected = 2 * np.einsum("nhwc,oc->nhwo", image, kernel[..., 0, 0]) * gain
    np.testing.assert_allclose(layer(image), expected, rtol=1e-5, atol=1e-5)


def test_own_gates_in_an_lstm(tmp_path):
    """Checks that the mapping gives the order of axes only. The gates stay as the file has them."""
    layer, x = steps_of(OwnLSTM(4))
    layer(x)
    w, u, b = RNG.normal(size=(16, 4)), RNG.normal(size=(16, 4)), RNG.normal(size=16)
    folder = saved(tmp_path, {"w.weight": w, "u.weight": u, "b": b})
    names = {"kernel": "w.weight", "recurrent_kernel": "u.weight"}
    with pytest.raises(PlanError, match="nor the order of its gates.*\n.*\n.*16 entries"):
        load(
            layer,
            folder,
            mapping={**{f"(.*/)?{k}": v for k, v in names.items()}, "(.*/)?bias": "b"},
        )
    mapping = {f"(.*/)?{k}": Key(v, transposed=True) for k, v in names.items()}
    load(layer, folder, mapping={**mapping, "(.*/)?bias": Key("b", transposed=False)})
    output, _, new, given = np.split(X @ w.T + b, 4, -1)
    cell = np.tanh(new) / (1 + np.exp(-given))
    np.testing.assert_allclose(
        layer(x), np.tanh(cell) / (1 + np.exp(-output)), rtol=1e-4, atol=1e-5
    )
