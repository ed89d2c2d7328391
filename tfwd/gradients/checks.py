"""Checks the arguments and the model before any computation."""

from __future__ import annotations

from typing import Any

import keras

from tfwd import _keras


def arguments(model: Any, training: Any, chunk_size: Any) -> None:
    """Raises a ValueError for wrong arguments."""
    if not isinstance(model, keras.Model):
        raise ValueError(f"expected a Keras model, got {model!r} of type {type(model).__name__}")
    if not isinstance(training, (bool, int)):
        raise ValueError(f"training must be True or False, got {training!r}")
    whole = isinstance(chunk_size, int) and not isinstance(chunk_size, bool)
    if chunk_size is not None and (not whole or chunk_size < 1):
        raise ValueError(f"chunk_size must be None or an int of at least 1, got {chunk_size!r}")


def build(model: keras.Model, x: Any) -> None:
    """Builds a model that is not built."""
    if not model.built or not all(layer.built for layer in _keras.layers.all_layers(model)):
        _keras.layers.build_by_call(model, (x,), {})
    if not model.trainable_variables:
        raise ValueError(f"model '{model.name}' has no trainable weights")


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
