"""Images that are flattened or made in a custom layer, or between the parts of a subclassed model.

A trace of the call shows the order. If `call` needs numbers, it cannot be traced. Then an order
that PyTorch may not have is an error.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import (
    KERNEL,
    LINEAR,
    Calls,
    Chain,
    Parts,
    X,
    convolution,
    convolved,
    head,
    linear,
    saved,
    sequential,
    touch,
)
from stack_marks import IS_KERAS_2

import tfwd
from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers


class SubclassedChain(Parts, keras.Model):
    """A subclassed model with parts."""


class Rows(layers.Layer):
    """A custom layer that flattens an image with a function, and has a `Dense` layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.f = head()

    def build(self, shape):
        self.f.build((None, 48))
        self.built = True

    def call(self, x):
        touch(x)
        return self.f(layers.Reshape((48,))(x))


def image():
    return [keras.Input((5, 4, 3)), convolution()]


def flat_head(kind=Chain):
    return kind(layers.Flatten(name="r"), head(), name="h")


TAKES = "'h' takes an image of (4, 3, 4), and may flatten it for this layer"
FLATTENS = "'r' flattens (4, 3, 4), maybe for this layer"
HIDDEN = {
    "layer": (lambda: sequential(*image(), flat_head()), TAKES),
    "model": (lambda: sequential(*image(), flat_head(SubclassedChain)), TAKES),
    "function": (lambda: sequential(*image(), Rows(name="h")), TAKES),
    "wrapper": (
        lambda: sequential(*image(), tfwd.layers.WeightDropout(flat_head(), 0.1)),
        TAKES,
    ),
    "with convolution": (
        lambda: sequential(
            keras.Input((5, 4, 3)), Chain(convolution(), layers.Flatten(name="r"), head())
        ),
        FLATTENS,
    ),
    "wrapper with convolution": (
        lambda: sequential(
            keras.Input((5, 4, 3)),
            tfwd.layers.WeightDropout(
                Chain(convolution(), layers.Flatten(name="r"), head()), 0.1, weights="kernel"
            ),
        ),
        FLATTENS,
    ),
    "model inside": (
        lambda: sequential(
            keras.Input((5, 4, 3)),
            Chain(sequential(*image(), layers.Flatten(name="r"), head())),
        ),
        FLATTENS,
    ),
    "behind a custom convolution": (
        lambda: sequential(keras.Input((5, 4, 3)), Chain(convolution()), flat_head()),
        TAKES,
    ),
    "between models": (
        lambda: SubclassedChain(
            keras.Sequential([*image(), layers.Flatten()], name="r"),
            sequential(keras.Input((48,)), head()),
        ),
        "the model does not show what calls",
    ),
    "behind a model": (
        lambda: SubclassedChain(keras.Sequential([*image(), layers.Flatten()], name="r"), head()),
        "'r' returns flattened features, maybe for this layer",
    ),
    "between a model and a layer": (
        lambda: SubclassedChain(sequential(*image()), layers.Flatten(name="r"), head()),
        FLATTENS,
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_flatten_that_a_trace_shows(name, tmp_path):
    model = HIDDEN[name][0]()
    model(X)
    saved(tmp_path, KERNEL, LINEAR)
    load(model, tmp_path, mapping={"(.*/)?c": "c", "(.*/)?f": "f"})
    expected = linear(convolved(X).reshape(2, -1))
    np.testing.assert_allclose(model(X, training=False), expected, rtol=1e-4, atol=1e-4)


# The graph of a model inside is known, also if nothing shows what calls it.
@pytest.mark.parametrize("name", [name for name in HIDDEN if name != "model inside"])
def test_a_hidden_flatten(name, tmp_path, monkeypatch):
    make, message = HIDDEN[name]
    model = make()
    model(X)
    monkeypatch.setattr(Calls, "need_numbers", True)
    saved(tmp_path, KERNEL, LINEAR)
    mapping = {"(.*/)?c": "c", "(.*/)?f": "f"}
    with pytest.raises(PlanError) as caught:
        load(model, tmp_path, mapping=mapping)
    assert f"f/kernel': {message}" in str(caught.value)
    assert "map to Key('f', flattened=(channels, height, width))" in str(caught.value)
    assert "f/bias'" not in str(caught.value)
    load(model, tmp_path, mapping={**mapping, "(.*/)?f": Key("f", flattened=(4, 4, 3))})
    expected = linear(convolved(X).reshape(2, -1))
    np.testing.assert_allclose(model(X, training=False), expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_flattens_the_sequence_of_another_layer(tmp_path, monkeypatch):
    """Checks a sequence of two axes, which may be an image of a `Conv1D` or a sequence."""
    tail = sequential(keras.Input((8, 5)), layers.Flatten(), layers.Dense(4, name="f"))
    model = SubclassedChain(layers.Conv1D(5, 1, name="c"), tail)
    x = RNG.normal(size=(2, 8, 3))
    model(x)
    c = {"c.weight": RNG.normal(size=(5, 3, 1)), "c.bias": np.zeros(5)}
    f = RNG.normal(size=(4, 40))
    saved(tmp_path, c, {"f.weight": f, "f.bias": np.zeros(4)})
    load(model, tmp_path, mapping={"c": "c", "(.*/)?f": "f"})
    expected = np.einsum("nti,oi->not", x, c["c.weight"][:, :, 0]).reshape(2, -1) @ f.T
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(Calls, "need_numbers", True)
    with pytest.raises(PlanError, match="f/kernel': the model does not show what calls"):
        load(model, tmp_path, mapping={"c": "c", "(.*/)?f": "f"})


def decoder_in_a_layer():
    return sequential(keras.Input((7,)), Chain(*decoder_parts()))


def reshape_in_a_layer():
    dense, reshape, point = decoder_parts()
    return sequential(keras.Input((7,)), dense, Chain(reshape), point)


def decoder_behind_a_layer():
    dense, *rest = decoder_parts()
    return sequential(keras.Input((7,)), dense, Chain(*rest))


def subclassed_decoder():
    return SubclassedChain(*decoder_parts())


def decoder_parts():
    return (
        layers.Dense(40, name="f"),
        layers.Reshape((8, 5), name="r"),
        layers.Conv1D(3, 1, name="c"),
    )


@pytest.mark.parametrize(
    "make", [decoder_in_a_layer, reshape_in_a_layer, decoder_behind_a_layer, subclassed_decoder]
)
def test_a_hidden_reshape_to_an_image(make, tmp_path, monkeypatch):
    model, x = make(), RNG.normal(size=(2, 7))
    model(x)
    c, f = RNG.normal(size=(3, 5, 1)), RNG.normal(size=(40, 7))
    biases = {"c.bias": np.zeros(3), "f.bias": np.zeros(40)}
    saved(tmp_path, {"c.weight": c, "f.weight": f}, biases)
    load(model, tmp_path, mapping={"(.*/)?c": "c", "(.*/)?f": "f"})
    expected = np.einsum("nit,oi->nto", (x @ f.T).reshape(2, 5, 8), c[:, :, 0])
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(Calls, "need_numbers", True)
    with pytest.raises(PlanError, match="f/kernel': .*PyTorch flattens channels first"):
        load(model, tmp_path, mapping={"(.*/)?c": "c", "(.*/)?f": "f"})


def pooled_head():
    return sequential(*image(), Chain(layers.GlobalAveragePooling2D(), head()))


def flat_sequence():
    return sequential(
        *(keras.Input((12,)), layers.Embedding(9, 4, name="c")),
        Chain(layers.Flatten(), head()),
    )


@pytest.mark.parametrize("make", [pooled_head, flat_sequence])
def test_custom_layers_that_flatten_no_image(make, tmp_path):
    size = 4 if make is pooled_head else 48
    weight, table = RNG.normal(size=(6, size)), RNG.normal(size=(9, 4))
    model = make()
    first = KERNEL if make is pooled_head else {"c.weight": table}
    saved(tmp_path, first, {"f.weight": weight, "f.bias": LINEAR["f.bias"]})
    load(model, tmp_path, mapping={"c": "c", "(.*/)?f": "f"})
    ids = RNG.integers(0, 9, (2, 12))
    rows = convolved(X).mean((2, 3)) if make is pooled_head else table[ids].reshape(2, -1)
    expected = rows @ weight.T + LINEAR["f.bias"]
    got = model(X if make is pooled_head else ids)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def pooled(image):
    """Pools rows in pairs, and flattens the image."""
    rows = (image[:, ::2] + image[:, 1::2]) / 2
    return tf.reshape(rows, (-1, 24)) if IS_KERAS_2 else keras.ops.reshape(rows, (-1, 24))


class Pooled(layers.Layer):
    """A custom layer without weights that pools and flattens."""

    def call(self, image):
        return pooled(image)

    def compute_output_shape(self, shape):
        return (shape[0], 24)


@pytest.mark.parametrize(
    "make", [lambda: layers.Lambda(pooled, output_shape=(24,), name="r"), lambda: Pooled(name="r")]
)
def test_a_function_that_pools_and_flattens(make, tmp_path):
    weight, bias = RNG.normal(size=(6, 24)), RNG.normal(size=6)
    model = sequential(*image(), make(), head())
    saved(tmp_path, KERNEL, {"f.weight": weight, "f.bias": bias})
    load(model, tmp_path, mapping={"c": "c", "f": "f"})
    rows = convolved(X).reshape(2, 4, 2, 2, 3).mean(3).reshape(2, -1)
    np.testing.assert_allclose(model(X), rows @ weight.T + bias, rtol=1e-4, atol=1e-4)


def global_mean(image):
    return tf.reduce_mean(image, (1, 2)) if IS_KERAS_2 else keras.ops.mean(image, (1, 2))


@pytest.mark.parametrize("is_layer", [True, False])
def test_a_function_that_pools_all_positions(is_layer, tmp_path):
    weight, bias = RNG.normal(size=(6, 4)), RNG.normal(size=6)
    inputs, first = image()
    rows = first(inputs)
    rows = layers.Lambda(global_mean, output_shape=(4,))(rows) if is_layer else global_mean(rows)
    model = keras.Model(inputs, head()(rows))
    saved(tmp_path, KERNEL, {"f.weight": weight, "f.bias": bias})
    load(model, tmp_path, mapping={"c": "c", "f": "f"})
    expected = convolved(X).mean((2, 3)) @ weight.T + bias
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-4)
