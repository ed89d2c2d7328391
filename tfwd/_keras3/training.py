"""The training function of Keras 3's `fit`, and the iterators that it takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras


def compiled_loss(model: keras.Model) -> tuple[Any, Any]:
    """The loss and the outputs' weights that a model was compiled with, None if with none."""
    found = getattr(model, "_compile_loss", None)
    if found is None:
        return None, None
    return getattr(found, "_user_loss", None), getattr(found, "_user_loss_weights", None)


def steps_per_execution(model: keras.Model) -> int:
    """How many batches a call of the model's training function takes, but for an epoch's last."""
    return model.steps_per_execution


def iterator_from(model: keras.Model, data: Any, iterator: Any, steps: int) -> Iterator[Any]:
    """What the training function is given in place of an iterator whose first batch was taken.

    Args:
        model: a compiled model.
        data: the batch that was taken.
        iterator: the iterator.
        steps: how many batches the function will take.
    """
    return itertools.chain([data], iterator)
