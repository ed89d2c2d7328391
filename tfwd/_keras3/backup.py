"""Arguments and state of Keras 3's `BackupAndRestore`."""

from __future__ import annotations

from typing import Any

import keras

# With these arguments a backup survives the end of `fit`, and a crash while it is written.
KEPT: dict[str, Any] = {"double_checkpoint": True, "delete_checkpoint": False}


def initial_epoch(callback: keras.callbacks.BackupAndRestore) -> int:
    """Returns the number of epochs in the backup from which training resumed."""
    return callback.model._initial_epoch or 0


def is_compiled(model: keras.Model) -> bool:
    """Returns True if a model has an optimizer and a loss. Returns False for other objects."""
    return getattr(model, "compiled", False)


def can_begin(model: keras.Model) -> bool:
    """Returns True if the callback accepts the model: it must already have its weights."""
    return model.built
