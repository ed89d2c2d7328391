"""State of layers in TensorFlow's checkpoints: seed states, counters and lists of layers."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd._keras3.variables import tf_variable

SeedState = keras.random.SeedGenerator


def checkpoint(layer: Any, generator: keras.random.SeedGenerator) -> None:
    """Makes TensorFlow's checkpoints of a layer save a seed state. They save only attributes."""
    layer.tf_state = tf_variable(generator.state)


def checkpoint_list(layer: Any, name: str) -> None:
    """Makes TensorFlow's checkpoints save the layers in a list that is an attribute of a layer.

    Checkpoints follow attributes. They would silently omit the layers in the list.
    """
    for number, held in enumerate(getattr(layer, name)):
        layer._track_trackable(held, f"{name}_{number}", overwrite=True)


def add_counter(layer: Any, name: str, shape: tuple[int, ...]) -> None:
    """Gives a layer an int64 variable in which each replica counts separately.

    The variable is not among the layer's weights or in weight files. TensorFlow's checkpoints save
    it.

    Args:
        layer: Layer.
        name: str. Name of the attribute.
        shape: Shape.
    """
    options = {"dtype": "int64", "trainable": False, "aggregation": "sum", "name": name}
    if "synchronization" in inspect.signature(keras.Variable.__init__).parameters:
        options["synchronization"] = "on_read"  # one copy per replica (Keras 3.9 and later)
    with tf.init_scope(), keras.name_scope(layer.name):
        variable = keras.Variable(np.zeros(shape, "int64"), **options)
    object.__setattr__(layer, name, variable)
    layer._track_trackable(variable._value, name)
