"""Flattened images of unknown order that a model joins with other features.

PyTorch may have a normalized image with the channels first or last before it flattens. The oracle
is the formula of PyTorch's model in NumPy.
"""

import keras
import numpy as np
import pytest
from flattened_images import saved
from pointwise_convolution import CONV, conv, pointwise

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(2)
layers = keras.layers
IMAGE, OTHER = (RNG.normal(size=(2, *shape)).astype("float32") for shape in ((2, 3, 4), (5,)))
FIRST, LAST = (4, 2, 3), ()  # the key's shape if PyTorch has the channels first, and if it has not


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)


def norm(name="n"):
    return layers.LayerNormalization(center=False, scale=False, name=name)


def flat(image, order):
    """Returns PyTorch's flattened image."""
    return (image.transpose(0, 3, 1, 2) if order else image).reshape(len(image), -1)


def head(parts, *before):
    """Returns a model that joins parts, calls layers, and ends with a `Dense` layer."""
    image, other = keras.Input((2, 3, 4)), keras.Input((5,))
    joined = layers.Concatenate()(parts(image, other))
    for layer in before:
        joined = layer(joined)
    return keras.Model([image, other], layers.Dense(3, use_bias=False, name="f")(joined))


def unknown(image):
    return layers.Flatten()(norm()(image))


def with_other(image, other):
    return [unknown(image), other]


def other_first(image, other):
    return [other, unknown(image)]


def with_known(image, other):
    return [unknown(image), layers.Flatten()(conv()(image)), other]


def nested(image, other):
    return [other, layers.Concatenate()([layers.Flatten()(conv()(image)), unknown(image)])]


def twice(image, other):
    both = layers.Concatenate(axis=2)([image, image])
    return [unknown(image), layers.Flatten()(norm("m")(both)), other]


def both_unknown(image, other):
    return [unknown(image), layers.Flatten()(norm("m")(image)), other]


def features(parts, order):
    """Returns PyTorch's joined features."""
    own, known = flat(normalized(IMAGE), order), flat(pointwise(IMAGE), FIRST)
    return np.concatenate(
        {
            with_other: (own, OTHER),
            other_first: (OTHER, own),
            with_known: (own, known, OTHER),
            nested: (OTHER, known, own),
        }[parts],
        1,
    )


def files(folder, parts, weight, *more):
    return saved(folder, {"f.weight": weight}, CONV if parts in (with_known, nested) else {}, *more)


def mapping(parts, key):
    return {"f": key} | ({"c": "c"} if parts in (with_known, nested) else {})


@pytest.mark.parametrize("order", [FIRST, LAST], ids=["first", "last"])
@pytest.mark.parametrize("parts", [with_other, other_first, with_known, nested])
def test_the_order_of_one_part(parts, order, tmp_path):
    """The key gives the order of the unknown part. The others keep the order that is known."""
    expected = features(parts, order)
    w = RNG.normal(size=(3, expected.shape[1]))
    model, folder = head(parts), files(tmp_path, parts, w)
    with pytest.raises(PlanError, match=r"of 24 features.*flattened=\(4, 2, 3\)"):
        load(model, folder, mapping=mapping(parts, "f"))
    load(model, folder, mapping=mapping(parts, Key("f", flattened=order)))
    np.testing.assert_allclose(model([IMAGE, OTHER]), expected @ w.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", [FIRST, LAST], ids=["first", "last"])
def test_a_normalization_of_joined_features(order, tmp_path):
    features_in_torch = features(with_other, order)
    scale, w = RNG.normal(size=29), RNG.normal(size=(3, 29))
    own = {"b.weight": scale, "b.bias": 0 * scale, "b.running_mean": 0 * scale}
    folder = files(tmp_path, with_other, w, own, {"b.running_var": 0 * scale + 1})
    model = head(with_other, layers.BatchNormalization(name="b", epsilon=0.0))
    keys = {name: Key(name, flattened=order) for name in "bf"}
    load(model, folder, mapping=keys)
    expected = (features_in_torch * scale) @ w.T
    np.testing.assert_allclose(model([IMAGE, OTHER]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", [with_other, with_known])
@pytest.mark.parametrize("order", [FIRST, LAST], ids=["first", "last"])
def test_a_tensor_in_keras_order_of_axes(parts, order, tmp_path):
    """A shape beside `transposed=False` says that the rows have PyTorch's order."""
    if order:
        expected = features(parts, order)
    else:
        inputs = (unknown_part := normalized(IMAGE).reshape(2, -1), OTHER)
        if parts is with_known:
            inputs = (unknown_part, pointwise(IMAGE).reshape(2, -1), OTHER)
        expected = np.concatenate(inputs, 1)
    w = RNG.normal(size=(expected.shape[1], 3))
    key = Key("f", transposed=False, flattened=order)
    model = head(parts)
    load(model, files(tmp_path, parts, w), mapping=mapping(parts, "f") | {"f": key})
    np.testing.assert_allclose(model([IMAGE, OTHER]), expected @ w, rtol=1e-4, atol=1e-4)


def test_shapes_that_do_not_fit(tmp_path):
    w = RNG.normal(size=(3, 29))
    folder = files(tmp_path, with_other, w)
    for shape, said in (
        ((4, 2, 2), "has 16 entries, but a part of 24 features whose order"),
        ((29,), "has 29 entries, but a part of 24 features"),
        ((3, 2, 4), r"has other axes than \(2, 3, 4\), which Keras has here"),
        ((24,), "has one axis, which shows no order"),
    ):
        with pytest.raises(PlanError, match=said):
            load(head(with_other), folder, mapping={"f": Key("f", flattened=shape)})


@pytest.mark.parametrize("parts", [twice, both_unknown])
def test_several_unknown_parts(parts, tmp_path):
    """One shape cannot give the order of both parts, also if their sizes are equal."""
    both = np.concatenate([IMAGE, IMAGE], 2) if parts is twice else IMAGE
    expected = [normalized(each).reshape(2, -1) for each in (IMAGE, both)]
    expected = np.concatenate([*expected, OTHER], 1)
    w = RNG.normal(size=(3, expected.shape[1]))
    folder = files(tmp_path, with_other, w)
    with pytest.raises(PlanError, match=r"several parts.*flattened=\(\)\) if PyTorch has all"):
        load(head(parts), folder, mapping={"f": "f"})
    for shape in ((4, 2, 3), (4, 2, 6)):
        with pytest.raises(PlanError, match="does not show which of the joined parts of 24 and"):
            load(head(parts), folder, mapping={"f": Key("f", flattened=shape)})
    model = head(parts)
    load(model, folder, mapping={"f": Key("f", flattened=())})
    np.testing.assert_allclose(model([IMAGE, OTHER]), expected @ w.T, rtol=1e-4, atol=1e-4)
    stored = saved(tmp_path, {"f.weight": w.T})
    load(model, stored, mapping={"f": Key("f", transposed=False, flattened=())})
    np.testing.assert_allclose(model([IMAGE, OTHER]), expected @ w.T, rtol=1e-4, atol=1e-4)


def test_a_part_with_axes_of_equal_sizes(tmp_path):
    """The advice must not name a shape that shows no order."""
    image, other = keras.Input((2, 3, 3)), keras.Input((5,))
    flat_image = layers.Reshape((2, 9))(norm()(image))
    rows = layers.GlobalMaxPooling1D()(flat_image)
    joined = layers.Concatenate()([rows, other])
    model = keras.Model([image, other], layers.Dense(3, use_bias=False, name="f")(joined))
    folder = saved(tmp_path, {"f.weight": RNG.normal(size=(3, 14))})
    with pytest.raises(PlanError) as caught:
        load(model, folder, mapping={"f": "f"})
    assert "flattened=(3, 3)" not in str(caught.value)
    assert "flattened=()" in str(caught.value)
