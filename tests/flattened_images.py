"""Images that a model flattens: inputs, PyTorch's tensors, and PyTorch's formulas in NumPy."""

import keras
import numpy as np
from safetensors.numpy import save_file

RNG = np.random.default_rng(0)
layers = keras.layers
X = RNG.normal(size=(2, 5, 4, 3)).astype("float32")  # examples, height, width, channels
KERNEL = {"c.weight": RNG.normal(size=(4, 3, 2, 2)), "c.bias": RNG.normal(size=4)}
LINEAR = {"f.weight": RNG.normal(size=(6, 4 * 4 * 3)), "f.bias": RNG.normal(size=6)}
NORM = {
    f"n.{name}": RNG.uniform(0.5, 2, 4 * 4 * 3)
    for name in ("weight", "bias", "running_mean", "running_var")
}
MAPPING = {"c": "c", "f": "f", "n": "n"}


def saved(folder, *parts):
    tensors = {name: value for part in parts for name, value in part.items()}
    tensors = {name: np.ascontiguousarray(value, "float32") for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def convolved(x):
    """Returns PyTorch's Conv2d, [examples, channels, height, width]."""
    image = np.zeros((len(x), 4, x.shape[1] - 1, x.shape[2] - 1))
    for i, j in np.ndindex(*image.shape[2:]):
        part = x[:, i : i + 2, j : j + 2]
        image[:, :, i, j] = np.einsum("nhwc,ochw->no", part, KERNEL["c.weight"])
    return image + KERNEL["c.bias"][:, None, None]


def linear(rows):
    return rows @ LINEAR["f.weight"].T + LINEAR["f.bias"]


def normalized(rows):
    scale = NORM["n.weight"] / np.sqrt(NORM["n.running_var"] + 1e-3)
    return (rows - NORM["n.running_mean"]) * scale + NORM["n.bias"]


def sequential(*parts):
    return keras.Sequential(list(parts))


def convolution():
    return layers.Conv2D(4, 2, name="c")


def head():
    return layers.Dense(6, name="f")


class Calls:
    """How `call` runs. With `need_numbers`, it fails for symbolic tensors, as NumPy's code does."""

    need_numbers = False


def touch(x):
    """Reads the numbers of a tensor if `Calls.need_numbers`."""
    if Calls.need_numbers:
        np.asarray(x)


class Parts:
    """A mixin that calls layers one after the other."""

    def __init__(self, *parts, **kwargs):
        super().__init__(**kwargs)
        self.parts = list(parts)

    def call(self, x):
        touch(x)
        for part in self.parts:
            x = part(x)
        return x


class Chain(Parts, layers.Layer):
    """A custom layer with parts."""
