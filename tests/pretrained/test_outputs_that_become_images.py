"""Outputs that become an image: PyTorch has channels first. The oracle is PyTorch's formula."""

import keras
import numpy as np
import pytest
from flattened_images import KERNEL, NORM, normalized, saved, sequential
from stack_marks import needs_keras3

from tfwd.pretrained import PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers


@pytest.mark.parametrize("style", ["weight", "kernel"])
def test_dense_whose_outputs_become_an_image(style, tmp_path):
    """Checks a decoder: PyTorch's `view(channels, height, width)`, then a 1 x 1 convolution."""
    w, b, x = RNG.normal(size=(48, 5)), RNG.normal(size=48), RNG.normal(size=(2, 5))
    point = RNG.normal(size=(2, 3, 1, 1))
    model = sequential(
        keras.Input((5,)),
        layers.Dense(48, name="d"),
        layers.BatchNormalization(name="n"),
        layers.ReLU(),
        layers.Reshape((4, 4, 3)),
        layers.Conv2D(2, 1, name="p", use_bias=False),
    )
    rows = np.maximum(normalized(x @ w.T + b), 0)
    if style == "weight":
        dense, image = {"d.weight": w}, rows.reshape(2, 3, 4, 4)
        norm = NORM
    else:  # a file in Keras's order, also of the biases
        dense, image = {"d.kernel": w.T}, np.moveaxis(rows.reshape(2, 4, 4, 3), -1, 1)
        names = {"weight": "gamma", "bias": "beta"}
        names |= {"running_mean": "moving_mean", "running_var": "moving_variance"}
        norm = {f"n.{ours}": NORM[f"n.{theirs}"] for theirs, ours in names.items()}
    folder = saved(tmp_path, dense, {"d.bias": b, "p.weight": point}, norm)
    load(model, folder, mapping={"d": "d", "n": "n", "p": "p"})
    expected = np.einsum("nchw,oc->nhwo", image, point[:, :, 0, 0])
    np.testing.assert_allclose(model(x.astype("float32")), expected, rtol=1e-3, atol=1e-3)


def frames_of_features():
    """Returns a decoder of several frames."""
    return sequential(
        keras.Input((2, 5)),
        layers.TimeDistributed(layers.Dense(12, name="d")),
        layers.TimeDistributed(layers.Reshape((2, 2, 3))),
        layers.TimeDistributed(layers.Conv2D(2, 1, name="p", use_bias=False)),
    )


def frames_by_a_model():
    inner = sequential(
        *(keras.Input((5,)), layers.Dense(12, name="d"), layers.Reshape((2, 2, 3))),
        layers.Conv2D(2, 1, name="p", use_bias=False),
    )
    return sequential(keras.Input((2, 5)), layers.TimeDistributed(inner))


@pytest.mark.parametrize("make", [frames_of_features, frames_by_a_model])
def test_dense_whose_outputs_become_the_images_of_frames(make, tmp_path):
    w, b, x = RNG.normal(size=(12, 5)), RNG.normal(size=12), RNG.normal(size=(3, 2, 5))
    point = RNG.normal(size=(2, 3, 1, 1))
    model = make()
    folder = saved(tmp_path, {"d.weight": w, "d.bias": b, "p.weight": point})
    load(model, folder, mapping={"d": "d", "p": "p"})
    images = (x @ w.T + b).reshape(3, 2, 3, 2, 2)
    expected = np.einsum("ntchw,oc->nthwo", images, point[:, :, 0, 0])
    np.testing.assert_allclose(model(x.astype("float32")), expected, rtol=1e-4, atol=1e-4)


def table_of_images():
    inputs = keras.Input((1,), dtype="int32")
    return keras.Model(inputs, layers.Reshape((2, 2, 3))(layers.Embedding(7, 12, name="d")(inputs)))


def einsum_of_images():
    inputs = keras.Input((5,))
    rows = layers.EinsumDense("ab,bc->ac", 12, bias_axes="c", name="d")(inputs)
    return keras.Model(inputs, layers.Reshape((2, 2, 3))(rows))


def sequences_of_images():
    inputs = keras.Input((4, 5))
    rows = layers.EinsumDense("abc,cd->abd", (4, 12), bias_axes="d", name="d")(inputs)
    images = layers.Reshape((4, 2, 2, 3))(rows)
    return keras.Model(inputs, layers.TimeDistributed(layers.ReLU())(images))


def half_of_the_outputs():
    inputs = keras.Input((5,))
    half = layers.Lambda(lambda rows: rows[:, :12], output_shape=(12,))
    rows = half(layers.Dense(24, name="d")(inputs))
    return keras.Model(inputs, layers.Reshape((2, 2, 3))(rows))


@pytest.mark.parametrize(
    "make", [table_of_images, einsum_of_images, sequences_of_images, half_of_the_outputs]
)
def test_outputs_that_become_an_image_in_an_unknown_order(make, tmp_path):
    inside = make()
    model = sequential(
        *(keras.Input(inside.input_shape[1:]), inside),
        layers.ZeroPadding3D(1) if make is sequences_of_images else layers.ZeroPadding2D(1),
    )
    outputs = 24 if make is half_of_the_outputs else 12
    weight = RNG.normal(size=(7, 12) if make is table_of_images else (outputs, 5))
    bias = {} if make is table_of_images else {"d.bias": RNG.normal(size=outputs)}
    saved(tmp_path, {"d.weight": weight}, bias)
    with pytest.raises(PlanError, match=r"map to Key\(.d(.weight)?., transposed=False, .*\(\)"):
        load(model, tmp_path, mapping={"d": "d"})


@pytest.mark.parametrize("name", ["Add", "Multiply", "Maximum"])
def test_outputs_that_are_combined_with_a_flattened_image(name, tmp_path):
    x = keras.Input((5, 4, 3))
    flat = layers.Flatten()(layers.Conv2D(4, 2, name="c")(x))
    other = layers.Dense(48, name="d")(seen := keras.Input((7,)))
    model = keras.Model([x, seen], getattr(layers, name)(name="r")([flat, other]))
    saved(tmp_path, KERNEL, {"d.weight": RNG.normal(size=(48, 7)), "d.bias": np.ones(48)})
    with pytest.raises(PlanError, match="'d/kernel': 'r' combines the outputs with flattened feat"):
        load(model, tmp_path, mapping={"c": "c", "d": "d"})


@needs_keras3("SpectralNormalization")
def test_outputs_of_a_normalized_kernel(tmp_path):
    inside = layers.SpectralNormalization(layers.Dense(72, use_bias=False), name="d")
    point = layers.Conv2D(2, 1, use_bias=False, name="p")
    model = sequential(keras.Input((7,)), inside, layers.Reshape((6, 4, 3)), point)
    weight, rows = RNG.normal(size=(72, 7)), RNG.normal(size=(2, 7))
    kernel = RNG.normal(size=(2, 3, 1, 1))
    saved(tmp_path, {"d.weight": weight, "p.weight": kernel})
    load(model, tmp_path, mapping={"d/.*kernel": "d.weight", "p": "p"}, allow_missing="d/vector_u")
    image = (rows @ weight.T).reshape(2, 3, 6, 4)
    expected = np.einsum("nihw,oi->nhwo", image, kernel[:, :, 0, 0])
    np.testing.assert_allclose(model(rows), expected, rtol=1e-4, atol=1e-4)
