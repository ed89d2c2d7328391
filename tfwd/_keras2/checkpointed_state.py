"""State of layers in TensorFlow's checkpoints: seed states, counters and lists of layers."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf


class SeedState(tf.__internal__.tracking.AutoTrackable):
    """A root seed and the number of the next call, which TensorFlow's checkpoints save.

    A layer with such an attribute does not get an additional weight.

    Args:
        seed: int of up to 63 bits. None draws a seed from Keras's global seed.

    Attributes:
        state: int64 `[root, next call]`.
    """

    def __init__(self, seed: int | None) -> None:
        generator = getattr(keras.src.backend._SEED_GENERATOR, "generator", None) or random
        root = generator.randint(1, 10**9) if seed is None else seed
        self.state = tf.Variable(
            np.asarray([root, 0], np.int64),
            trainable=False,
            name="seed_generator_state",  # each replica has its own copy with the same count
        )


def checkpoint(layer: Any, generator: SeedState) -> None:
    """Does nothing. On Keras 2, TensorFlow's checkpoints save a seed state by themselves."""


def checkpoint_list(layer: Any, name: str) -> None:
    """Does nothing. On Keras 2, TensorFlow's checkpoints save a list of layers by themselves."""


def add_counter(layer: Any, name: str, shape: tuple[int, ...]) -> None:
    """Gives a layer an int64 variable in which each replica counts separately.

    The variable is not among the layer's weights or in weight files. TensorFlow's checkpoints save
    it.

    Args:
        layer: Layer.
        name: str. Name of the attribute.
        shape: Shape.
    """
    with tf.init_scope():
        variable = tf.Variable(
            np.zeros(shape, np.int64),
            trainable=False,
            name=f"{layer.name}/{name}",
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    object.__setattr__(layer, name, variable)
    layer._track_trackable(variable, name)
