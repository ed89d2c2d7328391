"""Images that the caller gives to a layer on the channels, and that the model flattens.

The layer does not show whether PyTorch's model has the channels first and moves them for the layer,
or has them last. The oracle is NumPy with both orders.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(0)
layers = keras.layers
C, F = RNG.normal(size=(3, 3)), RNG.normal(size=(5, 4 * 6 * 3))


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)


def softmax(x):
    powers = np.exp(x)
    return powers / powers.sum(-1, keepdims=True)


def product(x):
    return x @ C.T


def dense():
    return layers.Dense(3, use_bias=False, name="c")


def einsum():
    return layers.EinsumDense("bhwi,io->bhwo", (4, 6, 3), name="c")


# Layers on the channels, their function, and True if they have a kernel.
LAYERS = {
    "dense": (lambda: [dense()], product, True),
    "dense, after a function": (lambda: [layers.Rescaling(1.0), dense()], product, True),
    "dense, dropped": (lambda: [dense(), layers.Dropout(0.5)], product, True),
    "dense in each row": (lambda: [layers.TimeDistributed(dense(), name="t")], product, True),
    "einsum": (lambda: [einsum()], product, True),
    "normalization": (
        lambda: [layers.LayerNormalization(center=False, scale=False)],
        normalized,
        False,
    ),
    "softmax": (lambda: [layers.Softmax()], softmax, False),
    "softmax as a function": (lambda: [layers.Lambda(tf.nn.softmax, (4, 6, 3))], softmax, False),
}


@pytest.mark.parametrize("flat", ["Flatten", "two reshapes"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_the_channels_of_an_image(name, flat, tmp_path):
    first, function, has_kernel = LAYERS[name]
    ends = [layers.Flatten()] if flat == "Flatten" else [layers.Reshape((24, 3)), layers.Flatten()]
    last = layers.Dense(5, use_bias=False, name="f")
    model = keras.Sequential([keras.Input((4, 6, 3)), *first(), *ends, last])
    file = saved(tmp_path, {"f.weight": F, **({"c.weight": C} if has_kernel else {})})
    mapping = {"f": "f", **({"(.*/)?c": "c"} if has_kernel else {})}
    with pytest.raises(PlanError, match=r"'f/kernel': .*flattened=\(\)"):
        load(model, file, mapping=mapping)
    x = RNG.normal(size=(2, 4, 6, 3)).astype("float32")
    channels_last = function(x)
    for shape, rows in (
        ((), channels_last.reshape(2, 72)),
        ((3, 4, 6), channels_last.transpose(0, 3, 1, 2).reshape(2, 72)),
    ):
        load(model, file, mapping={**mapping, "f": Key("f", flattened=shape)})
        np.testing.assert_allclose(model(x), rows @ F.T, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 24, 3), (24, 1, 3)])
def test_an_image_with_one_row_or_column(shape, tmp_path):
    last = layers.Dense(5, use_bias=False, name="f")
    model = keras.Sequential([keras.Input(shape), dense(), layers.Flatten(), last])
    file = saved(tmp_path, {"c.weight": C, "f.weight": F})
    with pytest.raises(PlanError, match=r"'f/kernel': .*flattened=\(\)"):
        load(model, file, mapping={"c": "c", "f": "f"})
    load(model, file, mapping={"c": "c", "f": Key("f", flattened=(3, *shape[:2]))})
    x = RNG.normal(size=(2, *shape)).astype("float32")
    rows = (x @ C.T).transpose(0, 3, 1, 2).reshape(2, 72)
    np.testing.assert_allclose(model(x), rows @ F.T, rtol=1e-4, atol=1e-4)


def test_heads_that_the_caller_gives(tmp_path):
    """An input `[steps, heads, size]`, whose heads a layer sums over, is no image."""
    layer = layers.EinsumDense("btns,nso->bto", (None, 4), name="e")
    model = keras.Sequential([keras.Input((5, 2, 3)), layer])
    w, x = RNG.normal(size=(4, 6)), RNG.normal(size=(2, 5, 2, 3)).astype("float32")
    load(model, saved(tmp_path, {"e.weight": w}), mapping={"e": "e"})
    np.testing.assert_allclose(model(x), x.reshape(2, 5, 6) @ w.T, rtol=1e-4, atol=1e-5)


def test_a_sequence_that_the_caller_gives(tmp_path):
    """PyTorch flattens `[steps, features]` in the same order, as the docs say."""
    last = layers.Dense(5, use_bias=False, name="f")
    model = keras.Sequential([keras.Input((24, 3)), dense(), layers.Flatten(), last])
    load(model, saved(tmp_path, {"c.weight": C, "f.weight": F}), mapping={"c": "c", "f": "f"})
    x = RNG.normal(size=(2, 24, 3)).astype("float32")
    np.testing.assert_allclose(model(x), (x @ C.T).reshape(2, 72) @ F.T, rtol=1e-4, atol=1e-4)
