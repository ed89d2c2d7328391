"""Layers that only one other layer calls, on flattened images. Oracles: NumPy's formulas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved
from stack_marks import needs_keras3

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(0)
layers = keras.layers


class Cell(layers.Layer):
    """A recurrent cell of two dense layers. Only the first one takes the flattened image."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.state_size = self.output_size = units
        self.given = layers.Dense(units, use_bias=False, name="given")
        self.kept = layers.Dense(units, use_bias=False, name="kept")

    def build(self, shape):
        self.given.build((None, shape[-1]))
        self.kept.build((None, self.state_size))
        self.built = True

    def call(self, x, states, training=None):
        h = tf.tanh(self.given(x) + self.kept(states[0]))
        return h, [h]


def test_each_layer_of_a_cell_has_its_own_order(tmp_path):
    """With 24 units, the state has as many entries as the flattened image `[2, 3, 4]`."""
    x = RNG.normal(size=(2, 5, 2, 3, 4)).astype("float32")
    c, given, kept = RNG.normal(size=(4, 4)), RNG.normal(size=(24, 24)) / 5, np.eye(24) / 2
    kept[0, 1] = 1.0
    convolution = layers.Conv2D(4, 1, use_bias=False, name="c")
    model = keras.Sequential(
        [
            keras.Input((5, 2, 3, 4)),
            layers.TimeDistributed(convolution, name="t"),
            layers.TimeDistributed(layers.Flatten()),
            layers.RNN(Cell(24, name="cell"), name="r"),
        ]
    )
    tensors = {"c.weight": c[..., None, None], "given.weight": given, "kept.weight": kept}
    file = saved(tmp_path, tensors)
    mapping = {f"(.*/)?{name}": name for name in ("c", "given", "kept")}
    with pytest.raises(PlanError, match="flattened="):
        load(model, file, mapping=mapping)
    orders = {"(.*/)?given": Key("given", flattened=(4, 2, 3))}
    load(model, file, mapping={**mapping, **orders, "(.*/)?kept": Key("kept", flattened=())})
    h = np.zeros((2, 24))
    for step in range(5):
        flat = np.einsum("nhwi,oi->nohw", x[:, step], c).reshape(2, 24)
        h = np.tanh(flat @ given.T + h @ kept.T)
    np.testing.assert_allclose(model(x), h, rtol=1e-3, atol=1e-4)


def test_attention_on_flattened_frames(tmp_path):
    """The inputs of the projections are flattened images, and the outputs of attention are not."""
    x = RNG.normal(size=(2, 5, 2, 3, 4)).astype("float32")
    convolution = layers.Conv2D(4, 1, use_bias=False, name="c")
    attention = layers.MultiHeadAttention(1, 6, use_bias=False, name="m", output_shape=7)
    inputs = keras.Input((5, 2, 3, 4))
    z = layers.TimeDistributed(convolution, name="t")(inputs)
    z = layers.TimeDistributed(layers.Flatten())(z)
    model = keras.Model(inputs, attention(z, z))
    c, out = RNG.normal(size=(4, 4)), RNG.normal(size=(7, 6))
    q, k, v = (RNG.normal(size=(6, 24)) / 5 for _ in range(3))
    tensors = {"c.weight": c[..., None, None], "o.weight": out}
    tensors |= {"q.weight": q, "k.weight": k, "v.weight": v}
    projections = {"q": "query", "k": "key", "v": "value"}
    mapping = {"(.*/)?c": "c", "m/(.*/)?attention_output": Key("o", flattened=(), unflattened=())}
    for name, path in projections.items():
        mapping[f"m/(.*/)?{path}"] = Key(name, flattened=(4, 2, 3), unflattened=())
    load(model, saved(tmp_path, tensors), mapping=mapping)
    flat = np.einsum("nthwi,oi->ntohw", x, c).reshape(2, 5, 24)
    scores = np.einsum("nti,nsi->nts", flat @ q.T, flat @ k.T) / np.sqrt(6)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = weights @ (flat @ v.T) @ out.T
    np.testing.assert_allclose(model(x), expected, rtol=1e-3, atol=1e-4)


@needs_keras3("ReversibleEmbedding")
def test_a_table_that_multiplies_a_flattened_image(tmp_path):
    table = layers.ReversibleEmbedding(7, 24, name="e")
    table.build((None,))
    inputs = keras.Input((2, 3, 4))
    flat = layers.Flatten()(layers.Conv2D(4, 1, use_bias=False, name="c")(inputs))
    model = keras.Model(inputs, table(flat, reverse=True))
    c, e = RNG.normal(size=(4, 4)), RNG.normal(size=(7, 24))
    file = saved(tmp_path, {"c.weight": c[..., None, None], "e.weight": e})
    with pytest.raises(PlanError, match="'e' multiplies flattened features by its table"):
        load(model, file, mapping={"c": "c", "e": "e"})
    columns = e.reshape(7, 4, 2, 3).transpose(0, 2, 3, 1).reshape(7, 24)
    file = saved(tmp_path, {"c.weight": c[..., None, None], "e.weight": columns})
    key = Key("e.weight", transposed=False, flattened=())
    load(model, file, mapping={"c": "c", "e/embeddings": key})
    x = RNG.normal(size=(2, 2, 3, 4)).astype("float32")
    flat = np.einsum("nhwi,oi->nohw", x, c).reshape(2, 24)
    np.testing.assert_allclose(model(x), flat @ e.T, rtol=1e-3, atol=1e-4)


def test_gates_of_a_convolutional_lstm(tmp_path):
    """The gates are in the order input, forget, output, cell, as a common program for PyTorch."""
    layer = layers.ConvLSTM2D(3, 1, recurrent_activation="sigmoid", name="r")
    model = keras.Sequential([keras.Input((4, 2, 2, 5)), layer])
    w, u, b = RNG.normal(size=(12, 5)), RNG.normal(size=(12, 3)), RNG.normal(size=12)
    tensors = {"w.weight": w[..., None, None], "u.weight": u[..., None, None], "b": b}
    names = {"kernel": "w.weight", "recurrent_kernel": "u.weight", "bias": "b"}
    mapping = {f"r/(.*/)?{path}": name for path, name in names.items()}
    with pytest.raises(PlanError, match="gates in the order input, forget, cell, output") as error:
        load(model, saved(tmp_path, tensors), mapping=mapping)
    assert str(error.value).count("which PyTorch does not have") == 3
    keras_gates = np.r_[0:6, 9:12, 6:9]
    tensors = {
        "w.weight": w[keras_gates].T[None, None],
        "u.weight": u[keras_gates].T[None, None],
        "b": b[keras_gates],
    }
    given = {path: Key(name, transposed=False) for path, name in mapping.items()}
    load(model, saved(tmp_path, tensors), mapping=given)
    x = RNG.normal(size=(2, 4, 2, 2, 5)).astype("float32")
    h = cell = np.zeros((2, 2, 2, 3))
    for step in range(4):
        parts = np.split(x[:, step] @ w.T + h @ u.T + b, 4, -1)
        enter, forget, leave = (1 / (1 + np.exp(-one)) for one in parts[:3])
        cell = forget * cell + enter * np.tanh(parts[3])
        h = leave * np.tanh(cell)
    np.testing.assert_allclose(model(x), h, rtol=1e-3, atol=1e-4)
