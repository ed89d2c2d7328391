"""Arguments and state of Keras 2's `BackupAndRestore`."""

from __future__ import annotations

from typing import Any

import keras

# The arguments with which a backup survives the end of `fit`; a crash while it is written it does
# by itself, as TensorFlow's checkpoints are named when they are whole.
KEPT: dict[str, Any] = {"delete_checkpoint": False}


def initial_epoch(callback: keras.callbacks.BackupAndRestore) -> int:
    """The number of epochs in the backup that training has begun with."""
    return int(callback._training_state._ckpt_saved_epoch.numpy()) + 1


def is_compiled(model: keras.Model) -> bool:
    """Whether a model has an optimizer and a loss; False for what is no model."""
    return getattr(model, "_is_compiled", False)


def can_begin(model: keras.Model) -> bool:
    """Whether the callback takes the model as it is: here it waits for the weights to be made."""
    return True
