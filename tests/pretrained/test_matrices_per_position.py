"""Custom layers with another matrix at each position of a reshaped image, as in a capsule network.

The oracle is PyTorch's model in NumPy. Its capsules have the order `[types, height, width]`.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved
from pointwise_convolution import CONV, conv, pointwise

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(6)
layers = keras.layers
X = RNG.normal(size=(3, 2, 3, 4)).astype("float32")
W = RNG.normal(size=(12, 2, 5))  # [capsules, inputs, outputs], for 2 types of capsules
IN_KERAS = W.reshape(2, 2, 3, 2, 5).transpose(1, 2, 0, 3, 4).reshape(12, 2, 5)


class PerCapsule(layers.Layer):
    """Multiplies each capsule by its own matrix."""

    def __init__(self, form):
        super().__init__(name="caps")
        self.form = form

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[1], shape[2], 5), name="w")

    def call(self, x):
        w = tf.convert_to_tensor(self.w)
        if self.form == "rows":
            return (x[:, :, None, :] @ w)[:, :, 0]
        if self.form == "columns":
            return (tf.transpose(w, [0, 2, 1]) @ x[..., None])[..., 0]
        if self.form == "routed":  # each output capsule starts with an equal share
            votes = (tf.transpose(w, [0, 2, 1])[None] @ x[:, None, :, :, None])[:, 0, :, :, 0]
            return votes * tf.nn.softmax(tf.zeros_like(votes[..., :1]), 1) * 12
        return tf.einsum("bnd,ndo->bno", x, w)


@pytest.mark.parametrize("form", ["rows", "columns", "routed", "einsum"])
def test_a_matrix_for_each_capsule(form, tmp_path):
    inputs = keras.Input((2, 3, 4))
    capsules = layers.Reshape((12, 2))(conv()(inputs))
    outputs = PerCapsule(form)(capsules)
    model = keras.Model(inputs, layers.GlobalMaxPooling1D()(outputs))
    in_torch = pointwise(X).reshape(3, 2, 3, 2, 2).transpose(0, 3, 1, 2, 4).reshape(3, 12, 2)
    expected = np.einsum("bnd,ndo->bno", in_torch, W).max(1)
    saved(tmp_path, CONV, {"w": W})
    for key in (Key("w"), Key("w", transposed=False)):
        with pytest.raises(PlanError, match=r"'caps/w'.*is a reshape.*flattened=\(\)"):
            load(model, tmp_path, mapping={"c": "c", "caps/w": key})
    saved(tmp_path, CONV, {"w": IN_KERAS})
    key = Key("w", transposed=False, flattened=())
    load(model, tmp_path, mapping={"c": "c", "caps/w": key})
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-4)


def test_steps_of_a_flattened_image(tmp_path):
    """PyTorch's steps have other pixels, so no order of the kernel is right."""
    inputs = keras.Input((2, 3, 4))
    steps = layers.Reshape((6, 4))(layers.Flatten()(conv()(inputs)))
    states = layers.SimpleRNN(3, use_bias=False, name="r")(steps)
    permuted = layers.Permute((3, 1, 2))(conv()(inputs))
    right = layers.SimpleRNN(3, use_bias=False, name="r")(
        layers.Reshape((6, 4))(layers.Flatten()(permuted))
    )
    k = RNG.normal(size=(3, 4)) / 4
    saved(tmp_path, CONV, {"r.weight_ih_l0": k, "r.weight_hh_l0": np.zeros((3, 3))})
    names = {"r/.*/kernel": "r.weight_ih_l0", "r/.*/recurrent_kernel": "r.weight_hh_l0", "c": "c"}
    with pytest.raises(PlanError, match="no order is right: call Permute with the channels first"):
        load(keras.Model(inputs, states), tmp_path, mapping=names)
    names["r/.*/kernel"] = Key("r.weight_ih_l0", flattened=())
    model = keras.Model(inputs, right)
    load(model, tmp_path, mapping=names)
    in_torch = pointwise(X).transpose(0, 3, 1, 2).reshape(3, 6, 4)
    np.testing.assert_allclose(model(X), np.tanh(in_torch[:, -1] @ k.T), rtol=1e-4, atol=1e-4)


ALONG = {
    "cumsum": lambda x: np.cumsum(x, 1),
    "slice": lambda x: x[:, :5],
    "pool": lambda x: x.reshape(len(x), 6, 2, -1).max(2),
}


class Along(layers.Layer):
    """Acts along the capsules, before a matrix on the numbers of each capsule."""

    def __init__(self, form):
        super().__init__(name="caps")
        self.form = form

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 5), name="w")

    def call(self, x):
        if self.form == "cumsum":
            x = tf.cumsum(x, 1)
        elif self.form == "slice":
            x = x[:, :5]
        else:
            x = tf.nn.max_pool1d(x, 2, 2, "VALID")
        return x @ tf.convert_to_tensor(self.w)


@pytest.mark.parametrize("form", ALONG)
def test_an_operation_along_capsules_before_a_maximum(form, tmp_path):
    """PyTorch's capsules are others, if no `Permute` makes them the same. No weight follows."""
    w = RNG.normal(size=(2, 5))
    inputs = keras.Input((2, 3, 4))
    capsules = layers.Reshape((12, 2))(conv()(inputs))
    model = keras.Model(inputs, layers.GlobalMaxPooling1D()(Along(form)(capsules)))
    saved(tmp_path, CONV, {"w": w})
    names = {"c": "c", "caps/w": Key("w", transposed=False)}
    with pytest.raises(PlanError, match="'caps/w': the model chooses single features"):
        load(model, tmp_path, mapping=names)
    load(model, tmp_path, mapping={**names, "caps/w": Key("w", transposed=False, flattened=())})
    in_torch = ALONG[form](pointwise(X).reshape(3, 12, 2))  # a model with the channels last
    np.testing.assert_allclose(model(X), (in_torch @ w).max(1), rtol=1e-4, atol=1e-4)


class Distances(layers.Layer):
    """The negative squared distance to each prototype. The features are on axis 1 of the weight."""

    def __init__(self, count):
        super().__init__(name="caps")
        self.count = count

    def build(self, shape):
        self.w = self.add_weight(shape=(self.count, shape[1]), name="w")

    def call(self, x):
        return -tf.reduce_sum((x[:, None] - self.w) ** 2, -1)


@pytest.mark.parametrize("count", [5, 24])
def test_a_custom_weight_whose_features_are_on_axis_1(count, tmp_path):
    w = RNG.normal(size=(count, 24))
    inputs = keras.Input((2, 3, 4))
    model = keras.Model(inputs, Distances(count)(layers.Flatten()(conv()(inputs))))
    saved(tmp_path, CONV, {"w": w})
    given = {"transposed": False, "flattened": (4, 2, 3)}
    words = (
        "does not show which of these axes" if count == 24 else "but flattened=.* has 24 entries"
    )
    with pytest.raises(PlanError, match=f"{words}.*write \\({count}, 24\\) to the file"):
        load(model, tmp_path, mapping={"c": "c", "caps/w": Key("w", **given)})
    in_keras = w.reshape(count, 4, 2, 3).transpose(0, 2, 3, 1).reshape(count, 24)
    saved(tmp_path, CONV, {"w": in_keras})
    key = Key("w", transposed=False, flattened=())
    load(model, tmp_path, mapping={"c": "c", "caps/w": key})
    in_torch = pointwise(X).transpose(0, 3, 1, 2).reshape(3, 24)
    expected = -((in_torch[:, None] - w) ** 2).sum(-1)
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-3)
