"""Arguments and state of Keras 3's `BackupAndRestore`."""

from __future__ import annotations

from typing import Any

import keras

# The arguments with which a backup survives a crash while it is written, and the end of `fit`.
KEPT: dict[str, Any] = {"double_checkpoint": True, "delete_checkpoint": False}


def initial_epoch(callback: keras.callbacks.BackupAndRestore) -> int:
    """The number of epochs in the backup that training has begun with."""
    return callback.model._initial_epoch or 0


def is_compiled(model: keras.Model) -> bool:
    """Whether a model has an optimizer and a loss; False for what is no model."""
    return getattr(model, "compiled", False)


def can_begin(model: keras.Model) -> bool:
    """Whether the callback takes the model as it is: it wants one that has its weights."""
    return model.built
