"""Pieces of an image at some positions, which a model joins to features.

The expected outputs are PyTorch's formulas in NumPy. PyTorch's model may join pieces too, or it may
flatten the image at once, with the channels first.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved
from traced_images import C, Model, X, check, conv, head, image

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers


def maxima(x):
    """Returns the maxima over the quarters of an image, as in spatial pyramid pooling."""
    parts = [x[:, i : i + 2, j : j + 3] for i in (0, 2) for j in (0, 3)]
    return [tf.reduce_max(part, (1, 2)) for part in parts]


def cropped_maxima(x):
    crops = [((i, 2 - i), (j, 3 - j)) for i in (0, 2) for j in (0, 3)]
    return [layers.GlobalMaxPooling2D()(layers.Cropping2D(crop)(x)) for crop in crops]


def pooled(x):
    """Returns PyTorch's `adaptive_max_pool2d(x, 2)`, [examples, channels, 2, 2]."""
    return x.reshape(2, 5, 2, 2, 2, 3).max((3, 5))


# Pieces of an image [examples, 4, 6, 5], and PyTorch's [examples, ..., channels, positions].
ROWS = [
    lambda x: tf.unstack(x, axis=1),
    lambda x: [tf.squeeze(part, 1) for part in tf.split(x, 4, 1)],
    lambda x: [x[:, n] for n in range(4)],
]
PIECES = {
    "unstack": (ROWS[0], lambda x: x.transpose(0, 3, 1, 2)),
    "split": (ROWS[1], lambda x: x.transpose(0, 3, 1, 2)),
    "rows": (ROWS[2], lambda x: x.transpose(0, 3, 1, 2)),
    "flattened rows": (
        lambda x: [tf.reshape(part, (-1, 30)) for part in ROWS[2](x)],
        lambda x: x.transpose(0, 1, 3, 2).reshape(2, 30, 4),
    ),
    "maxima": (maxima, lambda x: pooled(x).reshape(2, 5, 4)),
    "cropped maxima": (cropped_maxima, lambda x: pooled(x).reshape(2, 5, 4)),
}


def joined(pieces):
    return Model(lambda m, x: m.f(tf.concat(pieces(m.c(x)), -1)), c=conv(), f=head())


@pytest.mark.parametrize("name", PIECES)
def test_joined_pieces_need_an_order(name, tmp_path):
    pieces, in_torch = PIECES[name]
    model, made = joined(pieces), in_torch(image())
    model(X)
    sizes = made.shape[-2:]
    weight = RNG.normal(size=(4, np.prod(sizes)))
    folder = saved(tmp_path, C, {"f.weight": weight})
    with pytest.raises(PlanError, match="'f/kernel': .* joins parts of an image, and PyTorch's"):
        load(model, folder, mapping={"c": "c", "f": "f"})
    if name != "flattened rows":
        load(model, folder, mapping={"c": "c", "f": Key("f", flattened=sizes)})
        expected = made.reshape(*made.shape[:-2], -1) @ weight.T
        np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-5)
    if name in ("maxima", "cropped maxima", "rows"):  # PyTorch's model joins pieces too
        load(model, folder, mapping={"c": "c", "f": Key("f", flattened=())})
        expected = made.swapaxes(-1, -2).reshape(*made.shape[:-2], -1) @ weight.T
        np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-5)


def test_other_joins_need_no_order(tmp_path):
    """Checks the mean and the maximum of an image, and the patches of a Swin transformer."""

    def call(m, x):
        x = m.c(x)
        patches = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        both = tf.concat([tf.reduce_mean(x, (1, 2)), tf.reduce_max(x, (1, 2))], -1)
        return tf.concat([m.f(both), tf.reduce_max(m.g(tf.concat(patches, -1)), (1, 2))], -1)

    weights = {"f.weight": RNG.normal(size=(4, 10)), "g.weight": RNG.normal(size=(3, 20))}
    x = np.moveaxis(image(), 1, -1)
    both = np.concatenate([x.mean((1, 2)), x.max((1, 2))], -1)
    patches = np.concatenate([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
    merged = (patches @ weights["g.weight"].T).max((1, 2))
    expected = np.concatenate([both @ weights["f.weight"].T, merged], -1)
    model = Model(call, c=conv(), f=head(), g=head(3, "g"))
    check(model, expected, tmp_path, C, weights)
