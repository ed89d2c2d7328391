"""Activations by the names that configs of published models have for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def _gelu(x: Any) -> tf.Tensor:
    """The exact one. (TensorFlow's has the root of 2 in float32, whatever the dtype.)"""
    return 0.5 * x * (1.0 + tf.math.erf(x * math.sqrt(0.5)))


def _tanh_gelu(x: Any) -> tf.Tensor:
    return 0.5 * x * (1.0 + tf.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


BY_NAME: dict[str, Callable[[Any], tf.Tensor]] = {
    "gelu": _gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "relu": tf.nn.relu,
    "silu": tf.nn.silu,
    "swish": tf.nn.silu,
    "tanh": tf.nn.tanh,
}


def activation(name: str) -> Callable[[Any], tf.Tensor]:
    """The function of a name: one of published configs ("gelu" is exact), or one of Keras's.

    Raises:
        ValueError: there is none of that name.
    """
    if name in BY_NAME:
        return BY_NAME[name]
    try:
        return keras.activations.get(name)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"activation={name!r} is none that there is: give one of {', '.join(BY_NAME)}, or the "
            "name of one of keras.activations"
        ) from error
