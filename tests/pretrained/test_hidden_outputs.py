"""Layers in branches, loops and cells: their outputs become an image, or meet flattened features.

The oracle is the formula of PyTorch's model in NumPy, with the channels first.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved
from pointwise_convolution import CONV, conv, pointwise
from stack_marks import needs_keras3

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(7)
layers = keras.layers
IMAGE = (4, 2, 3)  # in PyTorch
X = RNG.normal(size=(3, 2, 3, 4)).astype("float32")
V = RNG.normal(size=(3, 5)).astype("float32")
F = RNG.normal(size=(2, 24))


class Hidden(layers.Layer):
    """Calls a layer in a branch or in a loop."""

    def __init__(self, inner, form):
        super().__init__(name="h")
        self.inner, self.form = inner, form

    def build(self, shape):
        self.inner.build(shape)
        self.built = True

    def call(self, x):
        if self.form == "loop":
            step = lambda i, f: (i + 1, f + tf.tanh(self.inner(f)))  # noqa: E731
            return tf.while_loop(lambda i, f: i < 2, step, (tf.constant(0), x))[1]
        zeros = tf.zeros((tf.shape(x)[0], 24))
        return tf.cond(tf.reduce_any(x > -9), lambda: self.inner(x), lambda: zeros)

    def compute_output_shape(self, shape):
        return shape[0], 24


def flattened(x=X):
    """PyTorch's features of the convolved image."""
    return pointwise(x).transpose(0, 3, 1, 2).reshape(len(x), 24)


def image_of(features):
    """The convolved image that PyTorch makes of features."""
    return pointwise(features.reshape(-1, *IMAGE).transpose(0, 2, 3, 1))


def in_keras(table):
    """A table whose rows are images in PyTorch's order, in Keras's order."""
    return table.reshape(-1, *IMAGE).transpose(0, 2, 3, 1).reshape(table.shape)


def refused(model, folder, mapping, words):
    with pytest.raises(PlanError, match=words):
        load(model, folder, mapping=mapping)


def test_an_embedding_in_a_branch_becomes_an_image(tmp_path):
    ids = np.array([2, 0, 6])
    table = RNG.normal(size=(7, 24))
    inputs = keras.Input((), dtype="int32")
    hidden = Hidden(layers.Embedding(7, 24, name="e"), "branch")(inputs)
    model = keras.Model(inputs, conv()(layers.Reshape((2, 3, 4))(hidden)))
    saved(tmp_path, CONV, {"e.weight": table})
    names = {"c": "c", "h/e": "e"}
    refused(model, tmp_path, names, "'h/e/embeddings': .*unflattened")
    saved(tmp_path, CONV, {"e.weight": in_keras(table)})
    load(model, tmp_path, mapping={**names, "h/e": Key("e", transposed=False, unflattened=())})
    np.testing.assert_allclose(model(ids), image_of(table[ids]), rtol=1e-4, atol=1e-4)


def test_a_dense_in_a_branch_becomes_an_image(tmp_path):
    w = RNG.normal(size=(24, 5))
    inputs = keras.Input((5,))
    hidden = Hidden(layers.Dense(24, use_bias=False, name="d"), "branch")(inputs)
    model = keras.Model(inputs, conv()(layers.Reshape((2, 3, 4))(hidden)))
    saved(tmp_path, CONV, {"d.weight": w})
    names = {"c": "c"}
    refused(
        model, tmp_path, {**names, "h/d": Key("d", flattened=())}, "'h/d/kernel': .*unflattened"
    )
    key = Key("d", flattened=(), unflattened=IMAGE)
    load(model, tmp_path, mapping={**names, "h/d": key})
    np.testing.assert_allclose(model(V), image_of(V @ w.T), rtol=1e-4, atol=1e-4)


def test_a_loop_on_flattened_features(tmp_path):
    w = RNG.normal(size=(24, 24)) / 5
    inputs = keras.Input((2, 3, 4))
    hidden = Hidden(layers.Dense(24, use_bias=False, name="d"), "loop")
    outputs = layers.Dense(2, use_bias=False, name="f")(hidden(layers.Flatten()(conv()(inputs))))
    model = keras.Model(inputs, outputs)
    saved(tmp_path, CONV, {"d.weight": w, "f.weight": F})
    names = {"c": "c", "f": Key("f", flattened=IMAGE)}
    asked = {**names, "h/d": Key("d", flattened=IMAGE)}
    refused(model, tmp_path, asked, "'h/d/kernel': .*unflattened")
    load(model, tmp_path, mapping={**names, "h/d": Key("d", flattened=IMAGE, unflattened=IMAGE)})
    state = flattened()
    for _ in range(2):
        state = state + np.tanh(state @ w.T)
    np.testing.assert_allclose(model(X), state @ F.T, rtol=1e-4, atol=1e-4)


class Cell(layers.Layer):
    """A recurrent cell of two layers."""

    def __init__(self):
        super().__init__(name="cell")
        self.state_size = self.output_size = 24
        self.wx = layers.Dense(24, use_bias=False, name="wx")
        self.wh = layers.Dense(24, use_bias=False, name="wh")

    def build(self, shape):
        self.wx.build(shape)
        self.wh.build((None, 24))
        self.built = True

    def call(self, x, states):
        state = tf.tanh(self.wx(x) + self.wh(states[0]))
        return state, [state]


def test_the_state_of_a_cell_becomes_an_image(tmp_path):
    wx, wh = RNG.normal(size=(24, 5)), RNG.normal(size=(24, 24)) / 5
    inputs = keras.Input((2, 5))
    states = layers.RNN(Cell(), name="h")(inputs)
    model = keras.Model(inputs, conv()(layers.Reshape((2, 3, 4))(states)))
    saved(tmp_path, CONV, {"wx.weight": wx, "wh.weight": wh})
    names = {"c": "c", ".*/wx": Key("wx", flattened=(), unflattened=IMAGE)}
    asked = {**names, ".*/wh": Key("wh", unflattened=IMAGE)}
    refused(model, tmp_path, asked, "/wh/kernel': .* its cell may take them too.*flattened")
    load(model, tmp_path, mapping={**asked, ".*/wh": Key("wh", flattened=IMAGE, unflattened=IMAGE)})
    x = RNG.normal(size=(3, 2, 5)).astype("float32")
    state = np.zeros((3, 24))
    for step in range(2):
        state = np.tanh(x[:, step] @ wx.T + state @ wh.T)
    np.testing.assert_allclose(model(x), image_of(state), rtol=1e-4, atol=1e-4)


class TwoArguments(keras.Model):
    """A model whose call takes two tensors, so that no trace shows its layers' inputs."""

    def __init__(self, form):
        super().__init__()
        self.c, self.flatten, self.form = conv(), layers.Flatten(), form
        if form == "table":
            self.p = layers.Embedding(7, 24, name="p")
        else:
            self.p = layers.Dense(24, use_bias=False, name="p")
        self.f = layers.Dense(2, use_bias=False, name="f")

    def call(self, x, y):
        return self.f(self.flatten(self.c(x)) * self.p(y))


@needs_keras3("call that no trace shows, if it has two tensors")
@pytest.mark.parametrize("form", ["table", "dense"])
def test_outputs_that_are_multiplied_by_flattened_features(form, tmp_path):
    w = RNG.normal(size=(7, 24) if form == "table" else (24, 5))
    y = np.array([2, 0, 6]) if form == "table" else V
    model = TwoArguments(form)
    model(X, y)
    saved(tmp_path, CONV, {"p.weight": w, "f.weight": F})
    names = {"c": "c", "f": Key("f", flattened=IMAGE)}
    given = {} if form == "table" else {"flattened": ()}
    refused(model, tmp_path, {**names, "p": Key("p", **given)}, "'p/.*': .*unflattened")
    key = Key("p", **given, unflattened=IMAGE)
    if form == "table":
        saved(tmp_path, CONV, {"p.weight": in_keras(w), "f.weight": F})
        key = Key("p", transposed=False, unflattened=())
    load(model, tmp_path, mapping={**names, "p": key})
    gate = w[y] if form == "table" else y @ w.T
    np.testing.assert_allclose(model(X, y), (flattened() * gate) @ F.T, rtol=1e-4, atol=1e-4)


class Optional(keras.Model):
    """A model with a branch that a call with one argument does not take."""

    def __init__(self, branch, use):
        super().__init__()
        self.c, self.o, self.use = conv(), branch, use
        self.f = layers.Dense(2, use_bias=False, name="f")

    def call(self, x, extra=None):
        features = tf.reshape(self.c(x), (-1, 24))
        return self.f(features if extra is None else self.use(self.o, features, extra))


class Needed(Optional):
    """The same model with a second argument that each call needs, so that no trace shows it."""

    def call(self, x, extra):
        return super().call(x, extra)


BRANCHES = {
    "table": (lambda: layers.Embedding(7, 24, name="o"), lambda o, f, e: f + o(e)),
    "norm": (lambda: layers.LayerNormalization(center=False, name="o"), lambda o, f, _: o(f)),
    "einsum": (lambda: layers.EinsumDense("bi,io->bo", 24, name="o"), lambda o, f, e: f + o(e)),
}


@needs_keras3("trace without the given arguments")
@pytest.mark.parametrize("form", BRANCHES)
@pytest.mark.parametrize("kind", [Optional, Needed])
def test_a_branch_that_the_trace_does_not_take(kind, form, tmp_path):
    make, use = BRANCHES[form]
    model = kind(make(), use)
    y = V if form == "einsum" else np.array([2, 0, 6])
    model(X, extra=y)
    sizes = {"table": (7, 24), "norm": (24,), "einsum": (24, 5)}[form]
    w = RNG.normal(size=sizes)
    saved(tmp_path, CONV, {"o.weight": w, "f.weight": F})
    f = Key("f", flattened=IMAGE)
    refused(model, tmp_path, {"c": "c", "f": f, "o": "o"}, "'o/.*: (the model|a method of Need)")
    keys = {
        "table": Key("o", transposed=False, unflattened=()),
        "norm": Key("o", flattened=IMAGE),
        "einsum": Key("o", unflattened=IMAGE),
    }
    if form == "table":
        saved(tmp_path, CONV, {"o.weight": in_keras(w), "f.weight": F})
    load(model, tmp_path, mapping={"c": "c", "f": f, "o": keys[form]})
    features = flattened()
    if form == "norm":
        mean, deviation = features.mean(1, keepdims=True), np.sqrt(features.var(1) + 1e-3)
        features = (features - mean) / deviation[:, None] * w
    else:
        features = features + (w[y] if form == "table" else y @ w.T)
    np.testing.assert_allclose(model(X, extra=y), features @ F.T, rtol=1e-4, atol=1e-4)
