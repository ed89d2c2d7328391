"""Subclassed models with a convolution and a flattened image, and PyTorch's formulas in NumPy."""

import keras
import numpy as np
from flattened_images import saved

from tfwd.pretrained import load

RNG = np.random.default_rng(1)
layers = keras.layers

X = RNG.normal(size=(2, 4, 6, 3)).astype("float32")  # examples, height, width, channels
ROWS = RNG.normal(size=(2, 7)).astype("float32")
C = {"c.weight": RNG.normal(size=(5, 3, 1, 1)), "c.bias": RNG.normal(size=5)}
F = {"f.weight": RNG.normal(size=(4, 120))}
G = {"g.weight": RNG.normal(size=(72, 7))}


def conv(filters=5):
    return layers.Conv2D(filters, 1, name="c")


def head(units=4, name="f"):
    return layers.Dense(units, name=name, use_bias=False)


def linear(name, x, weights):
    """Returns PyTorch's Linear without a bias."""
    return x @ weights[f"{name}.weight"].T


def dense_layers(**sizes):
    """Returns layers without a bias, and their weights in PyTorch."""
    made = {name: head(outputs, name) for name, (outputs, _) in sizes.items()}
    weights = {f"{name}.weight": RNG.normal(size=shape) for name, shape in sizes.items()}
    return made, weights


def point(image):
    """Returns PyTorch's Conv2d of width 1 on `[examples, channels, height, width]`."""
    bias = C["c.bias"][:, None, None]
    return np.einsum("nihw,oi->nohw", image, C["c.weight"][:, :, 0, 0]) + bias


def image(x=X):
    """Returns the convolution of X in PyTorch's order."""
    return point(np.moveaxis(x, -1, 1))


def flat(tensor):
    return tensor.reshape(len(tensor), -1)


class Model(keras.Model):
    """A model that calls a function with itself and its inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def call(self, x, training=False):
        return self.function(self, x)


def check(model, expected, tmp_path, *tensors, x=X):
    """Calls a model, loads it, and compares its outputs."""
    x = x if isinstance(x, tuple) else (x,)
    model(*x)
    names = {name.partition(".")[0] for each in tensors for name in each}
    load(model, saved(tmp_path, *tensors), mapping={f"(.*/)?{name}": name for name in names})
    np.testing.assert_allclose(model(*x), expected, rtol=1e-4, atol=1e-4)
