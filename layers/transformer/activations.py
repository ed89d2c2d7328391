"""Activations, by their names in configs of published models.

The formulas are the formulas of Hugging Face's `transformers`. Keras uses some of these names for
other formulas: the slope of its "leaky_relu" is 0.2, and here it is 0.01.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def _gelu(x: Any) -> tf.Tensor:
    """Computes the exact GELU. TensorFlow's GELU has the root of 2 in float32 for every dtype."""
    return 0.5 * x * (1.0 + tf.math.erf(x * math.sqrt(0.5)))


def _tanh_gelu(x: Any) -> tf.Tensor:
    return 0.5 * x * (1.0 + tf.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _clipped_gelu(x: Any) -> tf.Tensor:
    return tf.clip_by_value(_gelu(x), -10.0, 10.0)


def _quick_gelu(x: Any) -> tf.Tensor:
    return x * tf.sigmoid(1.702 * x)


def _leaky_relu(x: Any) -> tf.Tensor:
    return tf.nn.leaky_relu(x, alpha=0.01)


def _squared_relu(x: Any) -> tf.Tensor:
    return tf.square(tf.nn.relu(x))


def _mish(x: Any) -> tf.Tensor:
    return x * tf.tanh(tf.math.softplus(x))


BY_NAME: dict[str, Callable[[Any], tf.Tensor]] = {
    "gelu": _gelu,
    "gelu_python": _gelu,
    "gelu_10": _clipped_gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_accurate": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu_python_tanh": _tanh_gelu,
    "quick_gelu": _quick_gelu,
    "leaky_relu": _leaky_relu,
    "linear": tf.identity,
    "mish": _mish,
    "relu": tf.nn.relu,
    "relu2": _squared_relu,
    "relu6": tf.nn.relu6,
    "sigmoid": tf.nn.sigmoid,
    "silu": tf.nn.silu,
    "swish": tf.nn.silu,
    "tanh": tf.nn.tanh,
}


def activation(name: str) -> Callable[[Any], tf.Tensor]:
    """Returns the activation for a name. Names of published configs have precedence over Keras's.

    Args:
        name: str. Name in a published config or in `keras.activations`.

    Raises:
        ValueError: If no activation has that name.
    """
    if name in BY_NAME:
        return BY_NAME[name]
    try:
        return keras.activations.get(name)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"activation={name!r} is unknown: use one of {', '.join(BY_NAME)}, or a "
            "name from keras.activations"
        ) from error
