"""Windows of an image with a layer on the channels, whose results a model adds to the image.

PyTorch's model may move the channels last for the layer, and may move them back before it flattens.
The expected outputs are NumPy's formulas of both models.
"""

import keras
import numpy as np
import pytest
from flattened_images import saved

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers
X = RNG.normal(size=(2, 4, 4, 3)).astype("float32")  # examples, height, width, channels
CHANNELS = 6
W, C = RNG.normal(size=(CHANNELS, CHANNELS)), RNG.normal(size=(CHANNELS, 3, 1, 1))


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def in_windows(layer, x):
    """Returns a layer's results on the windows of 2 x 2 positions, [windows, positions, ...]."""
    split, moved = (2, 2, 2, 2, CHANNELS), (1, 3, 2, 4, 5)
    windows = layers.Permute(moved)(layers.Reshape(split)(x))
    results = layer(layers.Reshape((4, 4, CHANNELS))(windows))
    image = layers.Permute(moved)(layers.Reshape(split)(results))
    return layers.Reshape((4, 4, CHANNELS))(image)


def in_rows(layer, x):
    """Returns a layer's results on pairs of rows."""
    return layers.Reshape((4, 4, CHANNELS))(layer(layers.Reshape((2, 2, 4, CHANNELS))(x)))


# A layer on the channels, its formula, and its tensors in PyTorch.
LAYERS = {
    "dense": (
        lambda: layers.Dense(CHANNELS, use_bias=False, name="d"),
        lambda x: x @ W.T,
        {"d.weight": W},
    ),
    "einsum": (
        lambda: layers.EinsumDense("abcdi,io->abcdo", (2, 2, 4, CHANNELS), name="d"),
        lambda x: x @ W.T,
        {"d.weight": W},
    ),
    "normalization": (
        lambda: layers.LayerNormalization(name="d"),
        normalized,
        {"d.weight": np.ones(CHANNELS), "d.bias": np.zeros(CHANNELS)},
    ),
    "softmax": (layers.Softmax, softmax, {}),
}
CASES = [(in_windows, kind) for kind in LAYERS if kind != "einsum"]
CASES += [(in_rows, kind) for kind in LAYERS]
MERGES = {
    "add": (layers.Add, lambda a, b: a + b),
    "multiply": (layers.Multiply, lambda a, b: a * b),
    "concatenate": (layers.Concatenate, lambda a, b: np.concatenate([a, b], -1)),
}


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize(("divided", "kind"), CASES)
def test_a_layer_on_the_channels_shows_no_order(divided, kind, merge, tmp_path):
    make, formula, tensors = LAYERS[kind]
    merging, merged = MERGES[merge]
    inputs = keras.Input(X.shape[1:])
    image = layers.Conv2D(CHANNELS, 1, use_bias=False, name="c")(inputs)
    outputs = merging()([image, divided(make(), image)])
    outputs = layers.Dense(5, use_bias=False, name="f")(layers.Flatten()(outputs))
    model = keras.Model(inputs, outputs)
    values = X @ C[:, :, 0, 0].T
    values = merged(values, formula(values))
    weight = RNG.normal(size=(5, values[0].size))
    folder = saved(tmp_path, tensors, {"c.weight": C, "f.weight": weight})
    mapping = {"c": "c", "f": "f", **({"d": "d"} if tensors else {})}
    with pytest.raises(PlanError, match=r"(?s)'f/kernel': .* map to Key\('f', flattened=\(\)\)"):
        load(model, folder, mapping=mapping)
    axes = (2, 2, 2, 2) if divided is in_windows else (2, 2, 4)
    first = (values.shape[-1], *axes)
    for shape, in_torch in (
        ((), values),
        (first, np.moveaxis(values, -1, 1)),
    ):
        load(model, folder, mapping={**mapping, "f": Key("f", flattened=shape)})
        expected = in_torch.reshape(2, -1) @ weight.T
        np.testing.assert_allclose(model(X), expected, rtol=1e-3, atol=1e-4)
