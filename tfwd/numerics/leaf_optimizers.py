"""Finds the innermost optimizers of a model, which make its updates."""

from __future__ import annotations

from typing import Any

import keras

from tfwd._keras import training as _keras_training
from tfwd._keras import wrapped_optimizers

# Optimizers that turn finite numbers of moderate size into finite updates.
SAFE = ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "Adagrad", "Adadelta", "RMSprop", "Lion")


def leaf_optimizers(model: keras.Model) -> list[Any]:
    """Returns the innermost optimizers of all optimizers that a model holds."""
    optimizers = _keras_training.optimizers(model)
    return [leaf for one in optimizers for leaf in wrapped_optimizers.leaves(one)]
