"""Checks the arguments of `moments` and its model, before anything is computed."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras


def arguments(model: Any, training: Any, chunk_size: Any) -> None:
    """Raises a ValueError if an argument has a wrong type or value."""
    if not isinstance(model, keras.Model):
        raise ValueError(f"expected a Keras model, got {model!r} of type {type(model).__name__}")
    if not isinstance(training, (bool, int)):
        raise ValueError(f"training must be True or False, got {training!r}")
    is_int = isinstance(chunk_size, int) and not isinstance(chunk_size, bool)
    if chunk_size is not None and (not is_int or chunk_size < 1):
        raise ValueError(f"chunk_size must be None or an int of at least 1, got {chunk_size!r}")
    if chunk_size is not None:
        _activity_regularizers(model)


def _activity_regularizers(model: keras.Model) -> None:
    """Raises a ValueError for activity regularizers that are sums over the batch, not means."""
    for layer in _keras.layers.all_layers(model):
        if layer.activity_regularizer is not None and not _activity_losses_are_means():
            raise ValueError(
                f"layer '{layer.name}' has an activity regularizer, which this release of Keras "
                "sums over the batch. The sum cannot be computed in chunks: leave chunk_size out, "
                "or use a release of Keras that divides by the batch size"
            )


@functools.cache
def _activity_losses_are_means() -> bool:
    """Returns True if Keras divides the loss of an activity regularizer by the batch size."""
    with tf.init_scope():
        layer = keras.layers.Activation("linear", activity_regularizer=tf.reduce_sum)
        layer(tf.ones([2, 1]))
        return float(layer.losses[0]) == 1.0


def build(model: keras.Model, x: Any) -> None:
    """Builds a model, unless it is built."""
    if not model.built or not all(layer.built for layer in _keras.layers.all_layers(model)):
        _keras.layer_building.build_by_call(model, (x,), {})
    if not model.trainable_variables:
        raise ValueError(
            f"model '{model.name}' has no trainable weights: pass a model with at least one"
        )


def batch_normalization(model: keras.Model, training: bool) -> None:
    """Raises a ValueError for layers whose outputs for an example depend on other examples."""
    if not training:
        return
    for layer in _keras.layers.all_layers(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            raise ValueError(
                f"layer '{layer.name}' of type {type(layer).__name__} normalizes over the batch in "
                "training, so an example's gradient depends on the other examples: pass "
                "training=False, freeze it with layer.trainable = False, or use GroupNormalization"
            )
