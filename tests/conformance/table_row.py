"""A row of the table: a kind of layer and the inputs of its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

Inputs = Callable[[], tuple[list[tf.Tensor], dict[str, tf.Tensor]]]


class Row(NamedTuple):
    """A kind of layer.

    Attributes:
        name: name for test ids.
        make: makes a new plain layer.
        inputs: arguments of the layer's call, the same every time.
        default: names of the weights that are parametrized by default.
    """

    name: str
    make: Callable[[], keras.Layer]
    inputs: Inputs
    default: tuple[str, ...]


def floats(*shape: int) -> tf.Tensor:
    size = int(np.prod(shape))
    return tf.constant(np.sin(1.0 + 1.7 * np.arange(size)).reshape(shape), tf.float32)


def given(*arguments: tf.Tensor, **keywords: tf.Tensor) -> Inputs:
    return lambda: (list(arguments), keywords)
