"""Grey images whose channel a model repeats, as for a network on color images.

PyTorch has the channels before the rows of a patch, and Keras behind. No layer shows this.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(3)
layers = keras.layers
X = RNG.normal(size=(2, 4, 6, 1)).astype("float32")


class Repeated(layers.Layer):
    """A layer with the channel three times."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def call(self, x):
        return REPEATS[self.how](x)


REPEATS = {
    "gather": lambda x: tf.gather(x, [0, 0, 0], axis=-1),
    "repeat": lambda x: tf.repeat(x, 3, axis=-1),
    "tile": lambda x: tf.tile(x, (1, 1, 1, 3)),
    "join": lambda x: tf.concat([x, x, x], -1),
}


def patches(x):
    """Returns the patches of 2 x 2 pixels, `[examples, patches, features]`, in Keras's order."""
    x = layers.Reshape((2, 2, 3, 2, 3))(x)
    return layers.Reshape((6, 12))(layers.Permute((1, 3, 2, 4, 5))(x))


def in_torch():
    """Returns the patches in PyTorch's order: channels, rows and columns."""
    color = np.repeat(X, 3, -1).transpose(0, 3, 1, 2).reshape(2, 3, 2, 2, 3, 2)
    return color.transpose(0, 2, 4, 1, 3, 5).reshape(2, 6, 12)


@pytest.mark.parametrize("how", REPEATS)
def test_patches_of_repeated_channels(how, tmp_path):
    image = keras.Input((4, 6, 1))
    dense = layers.Dense(5, use_bias=False, name="f")
    model = keras.Model(image, dense(patches(Repeated(how)(image))))
    w = RNG.normal(size=(5, 12))
    folder = saved(tmp_path, {"f.weight": w})
    with pytest.raises(PlanError, match="'f/kernel'.*and PyTorch flattens channels first"):
        load(model, folder, mapping={"f": "f"})
    load(model, folder, mapping={"f": Key("f", flattened=(3, 2, 2))})
    np.testing.assert_allclose(model(X), in_torch() @ w.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["gather", "tile"])
def test_patches_of_a_repeated_series(how, tmp_path):
    series = keras.Input((6, 1))
    x = layers.Reshape((6, 3))(Repeated(how)(layers.Reshape((6, 1, 1))(series)))
    x = layers.Reshape((2, 9))(x)
    model = keras.Model(series, layers.Dense(5, use_bias=False, name="f")(x))
    folder = saved(tmp_path, {"f.weight": RNG.normal(size=(5, 9))})
    with pytest.raises(PlanError, match="'f/kernel'"):
        load(model, folder, mapping={"f": "f"})
