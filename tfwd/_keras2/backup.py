"""Arguments and state of Keras 2's `BackupAndRestore`."""

from __future__ import annotations

from typing import Any

import keras

# With these arguments a backup survives the end of `fit`. It also survives a crash while it is
# written, because TensorFlow names a checkpoint only after it is complete.
KEPT: dict[str, Any] = {"delete_checkpoint": False}


def initial_epoch(callback: keras.callbacks.BackupAndRestore) -> int:
    """Returns the number of epochs in the backup from which training resumed."""
    return int(callback._training_state._ckpt_saved_epoch.numpy()) + 1


def is_compiled(model: keras.Model) -> bool:
    """Returns True if a model has an optimizer and a loss. Returns False for other objects."""
    return getattr(model, "_is_compiled", False)


def can_begin(model: keras.Model) -> bool:
    """Returns True if the callback accepts the model. On Keras 2 it waits for the weights."""
    return True
