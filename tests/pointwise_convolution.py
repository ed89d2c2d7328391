"""A convolution over one pixel whose image is flattened, or made: Keras's layers and NumPy."""

import keras
import numpy as np
from flattened_images import sequential

RNG = np.random.default_rng(1)
layers = keras.layers
K = RNG.normal(size=(4, 4))
CONV = {"c.weight": K[..., None, None]}


def pointwise(image):
    """A convolution of `[examples, height, width, channels]` with the kernel K."""
    return np.einsum("nhwc,oc->nhwo", image, K)


def conv():
    return layers.Conv2D(4, 1, use_bias=False, name="c")


def behind_flatten(*parts):
    """Returns a model of a convolution, `Flatten`, and other layers; inputs; PyTorch's features."""
    x = RNG.normal(size=(2, 2, 3, 4)).astype("float32")
    model = sequential(keras.Input((2, 3, 4)), conv(), layers.Flatten(), *parts)
    return model, x, pointwise(x).transpose(0, 3, 1, 2).reshape(2, 24)
