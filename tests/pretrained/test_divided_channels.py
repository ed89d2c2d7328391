"""Reshapes of an image to one axis, or to parts of the channels: the order of positions is unknown.

PyTorch's `view` divides the channels before the positions. Keras has the positions first.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved
from stack_marks import IS_KERAS_2

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers
X = RNG.normal(size=(2, 4, 5, 3)).astype("float32")


def dense(units, name):
    return layers.Dense(units, name=name, use_bias=False)


# Number of filters, layers between the convolution and the last layer, and their kernels in
# PyTorch. The convolution has 4 x 5 positions.
MODELS = {
    "one number per capsule": (
        6,
        [layers.Reshape((40, 3)), dense(1, "k"), layers.Flatten()],
        (1, 3),
    ),
    "height and width exchanged": (
        6,
        [layers.Permute((2, 1, 3)), layers.Reshape((20, 6)), dense(1, "k"), layers.Flatten()],
        (1, 6),
    ),
    "divided, then merged": (
        6,
        [layers.Reshape((4, 5, 2, 3)), layers.Reshape((40, 3)), dense(1, "k"), layers.Flatten()],
        (1, 3),
    ),
    "number per capsule and step": (
        6,
        [layers.Reshape((40, 3)), layers.TimeDistributed(dense(1, "k")), layers.Flatten()],
        (1, 3),
    ),
    "layer per step": (
        6,
        [layers.Reshape((20, 6)), layers.TimeDistributed(dense(3, "k")), layers.Flatten()],
        (3, 6),
    ),
    "upsampled after an exchange": (
        6,
        [layers.Permute((2, 1, 3)), layers.UpSampling2D(), layers.Flatten()],
        None,
    ),
    "length of capsules": (
        6,
        [layers.Reshape((40, 3)), layers.Lambda(lambda x: tf.reduce_sum(x**2, -1), (40,))],
        None,
    ),
    "one channel": (2, [layers.Reshape((40, 1)), layers.Flatten()], None),
    "one channel, squeezed": (
        2,
        [layers.Reshape((40, 1)), layers.Lambda(lambda x: tf.squeeze(x, -1), (40,))],
        None,
    ),
    "one channel, a part": (
        2,
        [layers.Reshape((40, 1)), layers.Lambda(lambda x: x[:, ::2], (20, 1)), layers.Flatten()],
        None,
    ),
    "one channel, twice": (2, [layers.Reshape((40, 1, 1)), layers.Reshape((40,))], None),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_features_of_the_last_layer_are_refused(name, tmp_path):
    filters, between, shape = MODELS[name]
    convolution = layers.Conv2D(filters, 1, name="c", use_bias=False)
    model = keras.Sequential([keras.Input((4, 5, 3)), convolution, *between, dense(2, "f")])
    weights = {"c.weight": RNG.normal(size=(filters, 3, 1, 1))}
    weights["f.weight"] = RNG.normal(size=(2, model.layers[-1].kernel.shape[0]))
    mapping = {"c": "c", "f": "f"}
    if shape is not None:
        weights["k.weight"], mapping["k"] = RNG.normal(size=shape), "k"
    file = saved(tmp_path, weights)
    with pytest.raises(PlanError, match="'f/kernel': .*PyTorch flattens channels first"):
        load(model, file, mapping=mapping)
    load(model, file, mapping={**mapping, "f": Key("f", flattened=())})
    np.testing.assert_allclose(model.layers[-1].kernel, weights["f.weight"].T, rtol=1e-6)


# Layers on a sequence whose steps are the positions and parts of the channels of an image.
ON_STEPS = {
    "convolution": lambda: layers.Conv1D(4, 3, name="k", use_bias=False),
    "LSTM": lambda: layers.LSTM(4, name="k", use_bias=False),
    "SimpleRNN": lambda: layers.SimpleRNN(4, name="k", use_bias=False),
}


@pytest.mark.parametrize("part", [1, 3])
@pytest.mark.parametrize("kind", ON_STEPS)
def test_a_layer_on_the_steps_is_refused(kind, part, tmp_path):
    convolution = layers.Conv2D(2 * part, 1, name="c", use_bias=False)
    reshape = layers.Reshape((40, part))
    model = keras.Sequential([keras.Input((4, 5, 3)), convolution, reshape, ON_STEPS[kind]()])
    weights = {"c.weight": RNG.normal(size=(2 * part, 3, 1, 1))}
    shapes = [weight.shape for weight in model.layers[-1].weights]
    kernels = {"kernel": "k.weight_ih_l0", "recurrent_kernel": "k.weight_hh_l0"}
    mapping = {"c": "c", **{f"(.*/)?k/.*/{name}": key for name, key in kernels.items()}}
    if kind == "convolution":
        kernels, mapping = {"kernel": "k.weight"}, {"c": "c", "k": "k"}
    for key, shape in zip(kernels.values(), shapes, strict=True):
        weights[key] = RNG.normal(size=tuple(shape)[::-1])
    with pytest.raises(PlanError, match="/kernel': .*PyTorch flattens channels first"):
        load(model, saved(tmp_path, weights), mapping=mapping)


@pytest.mark.parametrize("name", ["transpose", "einsum"])
def test_a_permutation_by_a_function_in_a_graph(name, tmp_path):
    """Checks that a function is not known to be in PyTorch's model, as a `Permute` is not."""
    functions = tf if IS_KERAS_2 else keras.ops
    inputs = keras.Input((6, 3))
    rows = layers.Dense(4, name="d", use_bias=False)(inputs)
    if name == "transpose":
        exchanged = functions.transpose(rows, (0, 2, 1))
    else:
        exchanged = functions.einsum("btc->bct", rows)
    model = keras.Model(inputs, dense(2, "f")(layers.Flatten()(exchanged)))
    weights = {"d.weight": RNG.normal(size=(4, 3)), "f.weight": RNG.normal(size=(2, 24))}
    with pytest.raises(PlanError, match="'f/kernel': .*permutes like"):
        load(model, saved(tmp_path, weights), mapping={"d": "d", "f": "f"})


def test_channels_that_are_divided_alone(tmp_path):
    """Checks that a sum over a part of the channels of each position is known to be PyTorch's."""
    weights = {"c.weight": RNG.normal(size=(6, 3, 1, 1)), "f.weight": RNG.normal(size=(2, 3))}
    convolution = layers.Conv2D(6, 1, name="c", use_bias=False)
    parts = [
        layers.Reshape((4, 5, 2, 3)),
        layers.Lambda(lambda x: tf.reduce_sum(x, (1, 2, 3)), (3,)),
    ]
    model = keras.Sequential([keras.Input((4, 5, 3)), convolution, *parts, dense(2, "f")])
    load(model, saved(tmp_path, weights), mapping={"c": "c", "f": "f"})
    image = np.einsum("nhwi,oi->nohw", X, weights["c.weight"][:, :, 0, 0])
    expected = image.reshape(2, 2, 3, 4, 5).sum((1, 3, 4)) @ weights["f.weight"].T
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-4)


def test_steps_of_two_images_that_are_joined(tmp_path):
    """Checks that the mixed one of two images counts, in any order."""
    inputs = keras.Input((4, 5, 3))
    parts = [
        layers.Reshape((-1, 3))(layers.Conv2D(filters, 1, name=name, use_bias=False)(inputs))
        for filters, name in ((3, "c"), (6, "d"))
    ]
    joined = dense(1, "k")(layers.Concatenate(axis=1)(parts))
    model = keras.Model(inputs, dense(2, "f")(layers.Flatten()(joined)))
    weights = {
        "c.weight": RNG.normal(size=(3, 3, 1, 1)),
        "d.weight": RNG.normal(size=(6, 3, 1, 1)),
        "k.weight": RNG.normal(size=(1, 3)),
        "f.weight": RNG.normal(size=(2, 60)),
    }
    with pytest.raises(PlanError, match="'f/kernel'"):
        load(model, saved(tmp_path, weights), mapping={name: name for name in "cdkf"})


def test_a_convolution_after_an_exchange_of_height_and_width(tmp_path):
    first, second = (layers.Conv2D(6, 2, name=name, use_bias=False) for name in "cd")
    parts = [first, layers.Permute((2, 1, 3)), second, layers.GlobalAveragePooling2D()]
    model = keras.Sequential([keras.Input((4, 5, 3)), *parts])
    weights = {
        "c.weight": RNG.normal(size=(6, 3, 2, 2)),
        "d.weight": RNG.normal(size=(6, 6, 2, 2)),
    }
    with pytest.raises(PlanError, match="'d/kernel'"):
        load(model, saved(tmp_path, weights), mapping={"c": "c", "d": "d"})


def test_pooling_of_the_images_of_a_sequence(tmp_path):
    """Checks that PyTorch's model may pool each image, and then has the time first."""
    convolution = layers.Conv2D(6, 1, name="c", use_bias=False)
    parts = [layers.TimeDistributed(convolution), layers.MaxPooling3D((1, 2, 2)), layers.Flatten()]
    model = keras.Sequential([keras.Input((2, 4, 4, 3)), *parts, dense(2, "f")])
    weights = {"c.weight": RNG.normal(size=(6, 3, 1, 1)), "f.weight": RNG.normal(size=(2, 48))}
    with pytest.raises(PlanError, match="'f/kernel'"):
        load(model, saved(tmp_path, weights), mapping={"(.*/)?c": "c", "f": "f"})


def test_a_batch_normalization_of_steps(tmp_path):
    """Checks a weight for each step, with as many steps as channels."""
    convolution = layers.Conv1D(5, 1, name="c", use_bias=False)
    norm = layers.BatchNormalization(axis=1, center=False, name="n")
    model = keras.Sequential([keras.Input((5, 3)), convolution, norm])
    names = {"weight": 1, "running_mean": 0, "running_var": 1}
    weights = {f"n.{name}": np.full(5, float(value)) for name, value in names.items()}
    weights["c.weight"] = RNG.normal(size=(5, 3, 1))
    with pytest.raises(PlanError, match="'n/gamma'"):
        load(model, saved(tmp_path, weights), mapping={"c": "c", "n": "n"})


def test_a_functional_model_with_the_time_first(tmp_path):
    """Checks that an axis of examples that moves is not taken for a permutation."""
    functions = tf if IS_KERAS_2 else keras.ops
    inputs = keras.Input((6, 3))
    first = functions.transpose(dense(4, "d")(inputs), (1, 0, 2))  # [time, examples, features]
    back = functions.transpose(dense(5, "e")(first), (1, 0, 2))
    model = keras.Model(inputs, dense(2, "f")(layers.Reshape((30,))(back)))
    shapes = {"d.weight": (4, 3), "e.weight": (5, 4), "f.weight": (2, 30)}
    weights = {name: RNG.normal(size=shape) for name, shape in shapes.items()}
    load(model, saved(tmp_path, weights), mapping={name: name for name in "def"})
    x = RNG.normal(size=(2, 6, 3)).astype("float32")
    rows = x @ weights["d.weight"].T @ weights["e.weight"].T
    expected = rows.reshape(2, 30) @ weights["f.weight"].T
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-4)


def shuffled(order, block):
    """Returns a layer that makes an image `[8, 10, 3]` of parts of the channels."""

    def function(x):
        parts = tf.reshape(x, (-1, 4, 5, *block))
        return tf.reshape(tf.transpose(parts, order), (-1, 8, 10, 3))

    return layers.Lambda(function, (8, 10, 3))


@pytest.mark.parametrize("after", ["nothing", "convolution"])
def test_pixels_in_front_of_the_channels_are_refused(after, tmp_path):
    """TensorFlow's order of a block. PyTorch's `PixelShuffle` has the pixels behind the channels.

    The mapping may say that PyTorch's model has Keras's order.
    """
    rest = [layers.Conv2D(2, 1, name="k", use_bias=False)] if after == "convolution" else []
    first = layers.Conv2D(12, 1, name="c", use_bias=False)
    shuffle = shuffled((0, 1, 3, 2, 4, 5), (2, 2, 3))
    model = keras.Sequential([keras.Input((4, 5, 3)), first, shuffle, *rest])
    c, k = RNG.normal(size=(12, 3, 1, 1)), RNG.normal(size=(2, 3, 1, 1))
    file = saved(tmp_path, {"c.weight": c, **({"k.weight": k} if rest else {})})
    mapping = {"c": "c", **({"k": "k"} if rest else {})}
    with pytest.raises(PlanError, match="'c/kernel': .*makes pixels of channels.*unflattened=..."):
        load(model, file, mapping=mapping)
    load(model, file, mapping={**mapping, "c": Key("c", unflattened=())})
    blocks = np.einsum("nhwi,oi->nhwo", X, c[..., 0, 0]).reshape(2, 4, 5, 2, 2, 3)
    expected = blocks.transpose(0, 1, 3, 2, 4, 5).reshape(2, 8, 10, 3)
    if rest:
        expected = expected @ k[..., 0, 0].T
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-5)


def test_pixels_behind_the_channels(tmp_path):
    """PyTorch's order: `PixelShuffle(2)` in NumPy, with the channels first."""
    first = layers.Conv2D(12, 1, name="c", use_bias=False)
    shuffle = shuffled((0, 1, 4, 2, 5, 3), (3, 2, 2))
    model = keras.Sequential([keras.Input((4, 5, 3)), first, shuffle])
    c = RNG.normal(size=(12, 3, 1, 1))
    load(model, saved(tmp_path, {"c.weight": c}), mapping={"c": "c"})
    image = np.einsum("nhwi,oi->nohw", X, c[..., 0, 0]).reshape(2, 3, 2, 2, 4, 5)
    expected = image.transpose(0, 1, 4, 2, 5, 3).reshape(2, 3, 8, 10).transpose(0, 2, 3, 1)
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-5)


def test_boxes_of_a_detector(tmp_path):
    """PyTorch moves the channels to the end before it makes a list of boxes."""
    first = layers.Conv2D(8, 1, name="c", use_bias=False)
    model = keras.Sequential([keras.Input((4, 5, 3)), first, layers.Reshape((-1, 4))])
    c = RNG.normal(size=(8, 3, 1, 1))
    load(model, saved(tmp_path, {"c.weight": c}), mapping={"c": "c"})
    expected = np.einsum("nhwi,oi->nhwo", X, c[..., 0, 0]).reshape(2, 40, 4)
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-5)
