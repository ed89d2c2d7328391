"""Flattened images whose order the model does not show: errors, and the order by the mapping."""

import keras
import numpy as np
import pytest
from flattened_images import (
    KERNEL,
    LINEAR,
    Calls,
    X,
    convolution,
    convolved,
    head,
    linear,
    saved,
    sequential,
    touch,
)

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers


class Subclassed(keras.Model):
    """A model without a graph."""

    def __init__(self):
        super().__init__()
        self.c, self.flatten, self.f = convolution(), layers.Flatten(), head()

    def call(self, x):
        touch(x)
        return self.f(self.flatten(self.c(x)))


class Block(layers.Layer):
    """A custom layer of a functional model, with a convolution."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.c = convolution()

    def build(self, input_shape):
        self.c.build(input_shape)
        self.built = True

    def call(self, x):
        touch(x)
        return self.c(x)


def with_block():
    return sequential(keras.Input((5, 4, 3)), Block(), layers.Flatten(), head())


def columns():
    """Returns a model that reads an image column by column, as for text in images."""
    return sequential(
        *(keras.Input((5, 4, 3)), convolution()),
        *(layers.Reshape((4, 12), name="r"), head()),
    )


def tokens():
    return sequential(
        *(keras.Input((5, 4, 3)), convolution(), layers.Reshape((12, 4), name="r")),
        *(layers.Flatten(), head()),
    )


def rows_and_columns():
    """Returns a model that exchanges the rows and columns of an image, as PyTorch's may do."""
    return sequential(
        *(keras.Input((5, 4, 3)), convolution(), layers.Permute((2, 1, 3), name="r")),
        *(layers.Flatten(), head()),
    )


def permuted_sequence():
    inputs = keras.Input((5, 4, 3))
    steps = layers.Reshape((48, 1))(layers.Flatten()(convolution()(inputs)))
    steps = layers.SimpleRNN(1, return_sequences=True, use_bias=False, name="s")(steps)
    steps = layers.Permute((2, 1), name="r")(layers.Concatenate()([steps, steps]))
    return keras.Model(inputs, head()(layers.Flatten()(steps)))


class Backbone(Block):
    """A custom layer that flattens an image."""

    def call(self, x):
        image = super().call(x)
        return layers.Flatten()(image)


def with_backbone():
    return sequential(keras.Input((5, 4, 3)), Backbone(name="r"), head())


def on_channels():
    return sequential(
        *(keras.Input((5, 4, 3)), convolution(), layers.Dense(4, name="r")),
        *(layers.Flatten(), head()),
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_backbone, "'r' has convolutions inside, and may flatten an image"),
        (on_channels, "'r' is on the channels of an image of (4, 3, 4)"),
        (columns, "'r' is a reshape between an image of (4, 3, 4) and (4, 12)"),
        (tokens, "'r' is a reshape between an image of (4, 3, 4) and (12, 4)"),
        (Subclassed, "flattens (4, 3, 4), maybe for this layer"),
        (with_block, "has convolutions inside, and may return an image"),
        (rows_and_columns, "does not show whether PyTorch's model exchanges positions like 'r'"),
        (permuted_sequence, "does not show whether PyTorch's model permutes like 'r'"),
    ],
)
def test_an_order_that_the_model_does_not_show(make, message, tmp_path, monkeypatch):
    model = make()
    model(X)
    monkeypatch.setattr(Calls, "need_numbers", True)
    saved(tmp_path, KERNEL, LINEAR)
    mapping = {"c": "c", "f": "f", **({"r": "r"} if make is on_channels else {})}
    with pytest.raises(PlanError) as caught:
        load(model, tmp_path, mapping=mapping)
    assert "'f/kernel'" in str(caught.value)
    assert message in str(caught.value)
    assert "map to Key('f', flattened=(" in str(caught.value)
    assert "'f/bias'" not in str(caught.value)


@pytest.mark.parametrize("make", [with_backbone, with_block, Subclassed])
def test_an_order_that_a_trace_shows(make, tmp_path):
    model = make()
    model(X)
    load(model, saved(tmp_path, KERNEL, LINEAR), mapping={"c": "c", "f": "f", "(.*/)?c": "c"})
    expected = linear(convolved(X).reshape(2, -1))
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-4)


def test_the_mapping_says_the_order(tmp_path):
    model = Subclassed()
    model(X)
    saved(tmp_path, KERNEL, LINEAR)
    load(model, tmp_path, mapping={"c": "c", "f": Key("f", flattened=(4, 4, 3))})
    image = convolved(X)
    np.testing.assert_allclose(model(X), linear(image.reshape(2, -1)), rtol=1e-4, atol=1e-4)
    load(model, tmp_path, mapping={"c": "c", "f": Key("f", flattened=())})
    rows = np.moveaxis(image, 1, -1).reshape(2, -1)
    np.testing.assert_allclose(model(X), linear(rows), rtol=1e-4, atol=1e-4)
    with pytest.raises(PlanError, match="has 24 entries: give the shape in PyTorch"):
        load(model, tmp_path, mapping={"c": "c", "f": Key("f", flattened=(4, 2, 3))})


def test_the_mapping_says_the_order_in_a_row_of_an_image(tmp_path):
    weight = RNG.normal(size=(6, 12))
    saved(tmp_path, KERNEL, {"f.weight": weight, "f.bias": LINEAR["f.bias"]})
    model = columns()
    load(model, tmp_path, mapping={"c": "c", "f": Key("f", flattened=(4, 3))})
    rows = convolved(X).transpose(0, 2, 1, 3).reshape(2, 4, 12)
    expected = rows @ weight.T + LINEAR["f.bias"]
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-4)


def test_a_shared_layer_on_two_orders(tmp_path):
    inputs, other = keras.Input((5, 4, 3)), keras.Input((48,))
    dense = head()
    flat = layers.Flatten()(convolution()(inputs))
    model = keras.Model([inputs, other], [dense(flat), dense(other)])
    with pytest.raises(PlanError, match="calls the layer on features in several orders"):
        load(model, saved(tmp_path, KERNEL, LINEAR), mapping={"c": "c", "f": "f"})


def test_the_bias_of_a_convolution_does_not_depend_on_the_order_of_its_inputs(tmp_path):
    """Checks a volume whose depth becomes channels. Keras has the order [depth, channels]."""
    volume = layers.Conv3D(2, 1, name="a")
    image = layers.Conv2D(3, 1, name="b")
    model = sequential(keras.Input((4, 5, 6, 1)), volume, layers.Reshape((4, 5, 12)), image)
    a, b, bias = (RNG.normal(size=s) for s in ((2, 1, 1, 1, 1), (1, 1, 12, 3), (3,)))
    tensors = {"a.weight": a, "a.bias": np.zeros(2), "b.weight": b, "b.bias": bias}
    with pytest.raises(PlanError) as caught:
        load(model, saved(tmp_path, tensors), mapping={"a": "a", "b": "b"})
    assert "'b/kernel'" in str(caught.value)
    assert "'b/bias'" not in str(caught.value)
    kernel = Key("b.weight", transposed=False, flattened=())
    keys = {"a": "a", "b/kernel": kernel, "b/bias": "b.bias"}
    load(model, saved(tmp_path, tensors), mapping=keys)
    x = RNG.normal(size=(2, 4, 5, 6, 1))
    expected = (x * a.reshape(2)).reshape(2, 4, 5, 12) @ b[0, 0] + bias
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)
