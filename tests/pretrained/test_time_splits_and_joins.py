"""`TimeDistributed` along an axis of an image, second outputs, and images joined with others.

The oracle computes PyTorch's model with NumPy: the channels are first.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved, sequential
from stack_marks import needs_keras3

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers
X = RNG.normal(size=(2, 8, 3)).astype("float32")
CONV = {"c.weight": RNG.normal(size=(6, 3, 1)), "c.bias": RNG.normal(size=6)}


def convolved():
    """Returns PyTorch's Conv1d of width 1, [examples, channels, length]."""
    return np.einsum("nti,oi->not", X, CONV["c.weight"][:, :, 0]) + CONV["c.bias"][:, None]


def linear(features):
    return {"f.weight": RNG.normal(size=(4, features)), "f.bias": RNG.normal(size=4)}


def expected(images, head):
    return images.reshape(2, -1) @ head["f.weight"].T + head["f.bias"]


def test_time_along_an_axis_of_an_image(tmp_path):
    model = sequential(
        *(keras.Input((8, 3)), layers.Conv1D(6, 1, name="c")),
        *(layers.TimeDistributed(layers.ReLU(), name="t"), layers.Flatten()),
        layers.Dense(4, name="f"),
    )
    head = linear(48)
    file = saved(tmp_path, {**CONV, **head})
    with pytest.raises(PlanError, match="'t' runs its layer along an axis of an image"):
        load(model, file, mapping={"c": "c", "f": "f"})
    load(model, file, mapping={"c": "c", "f": Key("f", flattened=(6, 8))})
    images = np.maximum(convolved(), 0.0)
    np.testing.assert_allclose(model(tf.constant(X)), expected(images, head), rtol=1e-4, atol=1e-4)


def test_time_before_outputs_that_become_an_image(tmp_path):
    model = sequential(
        *(keras.Input((5,)), layers.Dense(24, name="d"), layers.Reshape((8, 3))),
        *(layers.TimeDistributed(layers.ReLU(), name="t"), layers.Conv1D(6, 1, name="c")),
    )
    made = {"d.weight": RNG.normal(size=(24, 5)), "d.bias": RNG.normal(size=24)}
    with pytest.raises(PlanError, match="'t' runs its layer along an axis of an image"):
        load(model, saved(tmp_path, {**CONV, **made}), mapping={"c": "c", "d": "d"})


@needs_keras3("functions of keras.ops in a graph")
@pytest.mark.parametrize("number", [0, 1])
def test_an_output_of_a_split(number, tmp_path):
    inputs = keras.Input((8, 3))
    half = keras.ops.split(layers.Conv1D(6, 1, name="c")(inputs), 2, axis=-1)[number]
    model = keras.Model(inputs, layers.Dense(4, name="f")(layers.Flatten()(half)))
    head = linear(24)
    load(model, saved(tmp_path, {**CONV, **head}), mapping={"c": "c", "f": "f"})
    images = convolved()[:, 3 * number : 3 * number + 3]
    np.testing.assert_allclose(model(tf.constant(X)), expected(images, head), rtol=1e-4, atol=1e-4)


@needs_keras3("functions of keras.ops in a graph")
@pytest.mark.parametrize("number", [0, 1])
def test_an_output_of_a_split_of_features(number, tmp_path):
    """PyTorch splits the features of a flattened image, so its halves are groups of channels."""
    inputs = keras.Input((8, 3))
    flat = layers.Flatten()(layers.Conv1D(6, 1, name="c")(inputs))
    half = keras.ops.split(flat, 2, axis=-1)[number]
    model = keras.Model(inputs, layers.Dense(4, name="f")(half))
    head = linear(24)
    file = saved(tmp_path, {**CONV, **head})
    try:
        load(model, file, mapping={"c": "c", "f": "f"})
    except PlanError:
        return
    images = convolved().reshape(2, -1)[:, 24 * number : 24 * number + 24]
    np.testing.assert_allclose(model(tf.constant(X)), expected(images, head), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("other", ["input", "image"])
def test_an_image_joined_with_another_image(other, tmp_path):
    """Checks two sequences in PyTorch's order. The order of the input is not known."""
    inputs = keras.Input((8, 3))
    images = layers.Conv1D(6, 1, name="c")(inputs)
    second = inputs if other == "input" else layers.ReLU()(images)
    joined = layers.Concatenate(name="j")([images, second])
    model = keras.Model(inputs, layers.Dense(4, name="f")(layers.Flatten()(joined)))
    head = linear(8 * joined.shape[-1])
    file = saved(tmp_path, {**CONV, **head})
    if other == "input":  # PyTorch's model may permute its input, or the result of the convolution
        with pytest.raises(PlanError, match="permutes its input"):
            load(model, file, mapping={"c": "c", "f": "f"})
        return
    load(model, file, mapping={"c": "c", "f": "f"})
    both = np.concatenate([convolved(), np.maximum(convolved(), 0.0)], 1)
    np.testing.assert_allclose(model(tf.constant(X)), expected(both, head), rtol=1e-4, atol=1e-4)


def test_an_image_joined_with_a_sequence(tmp_path):
    """PyTorch's model may have the channels of the image first or last."""
    inputs = keras.Input((8, 3))
    images = layers.Conv1D(6, 1, name="c")(inputs)
    second = layers.LSTM(3, return_sequences=True, trainable=False)(inputs)
    joined = layers.Concatenate(name="j")([images, second])
    model = keras.Model(inputs, layers.Dense(4, name="f")(layers.Flatten()(joined)))
    saved(tmp_path, {**CONV, **linear(8 * joined.shape[-1])})
    mapping = {"c": "c", "f": "f"}
    with pytest.raises(PlanError, match="'j' joins an image with tensors of another order"):
        load(model, tmp_path, mapping=mapping, allow_missing=".*lstm.*")
