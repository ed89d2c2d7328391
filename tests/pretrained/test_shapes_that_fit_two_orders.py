"""Shapes in a mapping that fit one order of axes in PyTorch, several orders, or none.

The oracle is the formula of PyTorch's model in NumPy.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved
from pointwise_convolution import CONV, conv, pointwise

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(4)
layers = keras.layers
K3 = RNG.normal(size=(4, 3))


def norm():
    return layers.LayerNormalization(center=False, scale=False, name="n")


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)


def head(*parts):
    """Returns a model with a `Dense` layer behind `Flatten`."""
    dense = layers.Dense(3, use_bias=False, name="f")
    return keras.Sequential([*parts, layers.Flatten(), dense])


def check(model, folder, shape, x, features, stored=(), **names):
    """Loads a kernel with a shape, and compares the outputs with PyTorch's outputs."""
    w = RNG.normal(size=(3, features[0].size))
    saved(folder, *stored, {"f.weight": w})
    load(model, folder, mapping={"f": Key("f", flattened=shape), **names})
    expected = features.reshape(len(x), -1) @ w.T
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("frames", [2, 4])
def test_frames_of_a_video(frames, tmp_path):
    """PyTorch has `[time, channels, height, width]`. Frames may be as many as channels."""
    x = RNG.normal(size=(2, frames, 3, 5, 4)).astype("float32")
    model = head(keras.Input(x.shape[1:]), norm())
    video = normalized(x).transpose(0, 1, 4, 2, 3)
    if frames == 2:
        check(model, tmp_path, (2, 4, 3, 5), x, video)
        check(model, tmp_path, (4, 2, 3, 5), x, video.swapaxes(1, 2))
        check(model, tmp_path, (), x, normalized(x))
        return
    saved(tmp_path, {"f.weight": RNG.normal(size=(3, 240))})
    with pytest.raises(PlanError) as caught:
        load(model, tmp_path, mapping={"f": "f"})
    assert "(4, 4, 3, 5)" not in str(caught.value)
    with pytest.raises(PlanError, match="because sizes are equal"):
        load(model, tmp_path, mapping={"f": Key("f", flattened=(4, 4, 3, 5))})
    check(model, tmp_path, (), x, normalized(x))


@pytest.mark.parametrize("width", [5, 3])
def test_height_and_width_that_keras_exchanges(width, tmp_path):
    """Keras has the columns first. PyTorch's model may have the columns first, or the rows."""
    x = RNG.normal(size=(2, 3, width, 4)).astype("float32")
    model = head(keras.Input(x.shape[1:]), conv(), layers.Permute((2, 1, 3)))
    rows = pointwise(x).transpose(0, 3, 1, 2)
    if width == 5:
        check(model, tmp_path, (4, 3, 5), x, rows, [CONV], c="c")
        check(model, tmp_path, (4, 5, 3), x, rows.swapaxes(2, 3), [CONV], c="c")
        return
    saved(tmp_path, CONV, {"f.weight": RNG.normal(size=(3, 36))})
    with pytest.raises(PlanError, match="because sizes are equal"):
        load(model, tmp_path, mapping={"c": "c", "f": Key("f", flattened=(4, 3, 3))})


@pytest.mark.parametrize("sizes", [(4, 5, 2, 3), (2, 2, 2, 2)])
def test_groups_of_channels(sizes, tmp_path):
    """The channels are divided into groups. A shape with merged channels may fit two orders."""
    x = RNG.normal(size=(2, *sizes)).astype("float32")
    model = head(keras.Input(x.shape[1:]), norm())
    first = normalized(x).transpose(0, 3, 4, 1, 2)
    if sizes == (4, 5, 2, 3):
        with pytest.raises(PlanError, match="or axes are merged"):  # groups first, or channels
            check(model, tmp_path, (6, 4, 5), x, first)
        check(model, tmp_path, (2, 3, 4, 5), x, first)
        return
    saved(tmp_path, {"f.weight": RNG.normal(size=(3, 16))})
    with pytest.raises(PlanError, match="because sizes are equal"):
        load(model, tmp_path, mapping={"f": Key("f", flattened=(4, 2, 2))})


def test_as_many_steps_as_groups(tmp_path):
    """PyTorch may have the groups of channels before the channels, or the steps."""
    x = RNG.normal(size=(2, 3, 3, 2)).astype("float32")
    model = head(keras.Input(x.shape[1:]), norm())
    saved(tmp_path, {"f.weight": RNG.normal(size=(3, 18))})
    with pytest.raises(PlanError, match="because sizes are equal"):
        load(model, tmp_path, mapping={"f": Key("f", flattened=(3, 2, 3))})
    check(model, tmp_path, (2, 3, 3), x, normalized(x).transpose(0, 3, 1, 2))


def test_outputs_that_become_two_images(tmp_path):
    """PyTorch divides the channels of one image. Keras divides the features first."""
    vector = keras.Input((5,))
    y = layers.Dense(48, use_bias=False, name="f")(vector)
    halves = [layers.Cropping1D(crop)(layers.Reshape((48, 1))(y)) for crop in ((0, 24), (24, 0))]
    images = [layers.Reshape((2, 3, 4))(half) for half in halves]
    model = keras.Model(vector, conv()(layers.Multiply()(images)))
    w = RNG.normal(size=(48, 5))
    saved(tmp_path, CONV, {"f.weight": w})
    with pytest.raises(PlanError) as caught:
        load(model, tmp_path, mapping={"c": "c", "f": "f"})
    assert "height, width" not in str(caught.value)
    for shape in ((8, 2, 3), (2, 4, 2, 3)):
        with pytest.raises(PlanError, match="only parts of the outputs become images"):
            load(model, tmp_path, mapping={"c": "c", "f": Key("f", unflattened=shape)})


def test_a_layer_on_joined_and_other_features(tmp_path):
    image, other = keras.Input((2, 3, 4)), keras.Input((48,))
    joined = layers.Concatenate()([layers.Flatten()(conv()(image)), layers.Flatten()(image)])
    dense = layers.Dense(3, use_bias=False, name="f")
    model = keras.Model([image, other], layers.Add()([dense(joined), dense(other)]))
    saved(tmp_path, CONV, {"f.weight": RNG.normal(size=(3, 48))})
    with pytest.raises(PlanError) as caught:
        load(model, tmp_path, mapping={"c": "c", "f": "f"})
    assert "height, width" not in str(caught.value)
    with pytest.raises(PlanError, match="is one shape, but several tensors are joined here"):
        load(model, tmp_path, mapping={"c": "c", "f": Key("f", flattened=(8, 2, 3))})


@pytest.mark.parametrize("how", ["divides", "joins"])
def test_channels_in_another_order(how, tmp_path):
    """PyTorch's `pixel_shuffle` has other channels, which no shape shows."""
    if how == "joins":
        image = layers.Lambda(lambda t: tf.nn.space_to_depth(t, 2), output_shape=(2, 2, 16))
        model = head(keras.Input((4, 4, 4)), conv(), image)
        stored, option, shape = {"f.weight": RNG.normal(size=(3, 64))}, "flattened", (16, 2, 2)
    else:
        image = layers.Lambda(lambda t: tf.nn.depth_to_space(t, 2), output_shape=(4, 6, 4))
        dense = layers.Dense(96, use_bias=False, name="f")
        parts = [keras.Input((5,)), dense, layers.Reshape((2, 3, 16)), image, conv()]
        model = keras.Sequential(parts)
        stored, option, shape = {"f.weight": RNG.normal(size=(96, 5))}, "unflattened", (16, 2, 3)
    saved(tmp_path, CONV, stored)
    with pytest.raises(PlanError, match="has the channels in another order") as caught:
        load(model, tmp_path, mapping={"c": "c", "f": "f"})
    assert f"{option}=(1" not in str(caught.value)
    with pytest.raises(PlanError, match="does not show the order inside the channels"):
        load(model, tmp_path, mapping={"c": "c", "f": Key("f", **{option: shape})})


def test_rows_of_an_image_beside_a_recurrent_layer(tmp_path):
    """The recurrent layer has the channels last, but PyTorch may flatten them first."""
    x = RNG.normal(size=(2, 5, 3, 4)).astype("float32")
    image = keras.Input((5, 3, 4))
    rows = layers.Lambda(lambda t: tf.reduce_max(t, 1), output_shape=(3, 4))(image)
    states = layers.SimpleRNN(3, use_bias=False, name="r")(rows)
    outputs = layers.Dense(3, use_bias=False, name="f")(layers.Flatten()(rows))
    model = keras.Model(image, layers.Add()([states, outputs]))
    w, k = RNG.normal(size=(3, 12)), 0.1 * RNG.normal(size=(3, 4))
    stored = {"f.weight": w, "r.weight_ih_l0": k, "r.weight_hh_l0": np.zeros((3, 3))}
    names = {"r/.*/kernel": "r.weight_ih_l0", "r/.*/recurrent_kernel": "r.weight_hh_l0"}
    saved(tmp_path, stored)
    with pytest.raises(PlanError, match="'f/kernel': the model does not show what the axes of"):
        load(model, tmp_path, mapping={"f": "f", **names})
    load(model, tmp_path, mapping={"f": Key("f", flattened=(4, 3)), **names})
    largest = x.max(1)
    expected = largest.transpose(0, 2, 1).reshape(2, 12) @ w.T + np.tanh(largest[:, -1] @ k.T)
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-4)


def test_an_input_whose_rows_a_recurrent_layer_reads(tmp_path):
    """PyTorch may have the channels last for the recurrent layer only."""
    x = RNG.normal(size=(2, 5, 3, 4)).astype("float32")
    image = keras.Input((5, 3, 4))
    rows = layers.SimpleRNN(3, return_sequences=True, use_bias=False, name="r")
    states = layers.TimeDistributed(rows, name="t")(image)
    states = layers.GlobalMaxPooling2D()(conv()(states))
    outputs = layers.Dense(4, use_bias=False, name="f")(layers.Flatten()(image))
    model = keras.Model(image, layers.Add()([states, outputs]))
    w, k = RNG.normal(size=(4, 60)), RNG.normal(size=(3, 4)) / 9
    stored = {"f.weight": w, "r.weight_ih_l0": k, "r.weight_hh_l0": np.zeros((3, 3))}
    names = {"t/.*/kernel": "r.weight_ih_l0", "t/.*/recurrent_kernel": "r.weight_hh_l0", "c": "c"}
    saved(tmp_path, stored, {"c.weight": K3[..., None, None]})
    with pytest.raises(PlanError, match="'f/kernel': the model does not show what the axes of"):
        load(model, tmp_path, mapping={"f": "f", **names})
    load(model, tmp_path, mapping={"f": Key("f", flattened=(4, 5, 3)), **names})
    steps = np.tanh(x @ k.T) @ K3.T
    expected = x.transpose(0, 3, 1, 2).reshape(2, 60) @ w.T + steps.max((1, 2))
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [3, 4])
def test_images_that_are_stacked_on_a_new_last_axis(size, tmp_path):
    """PyTorch has the channels first and the new axis last. Equal sizes do not show it."""
    image = keras.Input((5, size, 4) if size == 3 else (4, 4, 4))
    stack = layers.Lambda(lambda t: tf.stack([t, -t], -1), output_shape=(*image.shape[1:], 2))
    model = head(image, conv(), stack)
    shape = (4, *image.shape[1:3], 2)
    saved(tmp_path, CONV, {"f.weight": RNG.normal(size=(3, np.prod(shape)))})
    with pytest.raises(PlanError) as caught:
        load(model, tmp_path, mapping={"c": "c", "f": "f"})
    assert ("as Keras has" in str(caught.value)) == (size == 3)
    problem = "has other axes than" if size == 3 else "because sizes are equal"
    with pytest.raises(PlanError, match=problem):
        load(model, tmp_path, mapping={"c": "c", "f": Key("f", flattened=shape)})


def test_a_shape_of_four_axes_without_keras_axes(tmp_path):
    """A part of a model may have the features of a video or of a volume."""
    model = keras.Sequential([keras.Input((120,)), layers.Dense(3, use_bias=False, name="f")])
    saved(tmp_path, {"f.weight": RNG.normal(size=(3, 120))})
    with pytest.raises(PlanError, match="has 4 axes, but the model does not show which axes"):
        load(model, tmp_path, mapping={"f": Key("f", flattened=(5, 2, 3, 4))})
    load(model, tmp_path, mapping={"f": Key("f", flattened=(10, 3, 4))})
