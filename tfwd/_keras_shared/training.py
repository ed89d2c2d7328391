"""A model's training step in `fit`. Both versions of Keras share this code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras

from tfwd._keras_shared.own_code import is_of_keras
from tfwd._keras_shared.patching import swapped


def computed_loss(
    model: keras.Model, changed: Callable[[Any, Any], Any]
) -> contextlib.AbstractContextManager[None]:
    """Replaces a model's loss by `changed(loss, predictions)` in the body."""

    def methods(model: Any) -> dict[str, Callable[..., Any]]:
        own = model.compute_loss

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            predictions = kwargs.get("y_pred", args[2] if len(args) > 2 else None)
            return changed(own(*args, **kwargs), predictions)

        return {"compute_loss": compute_loss}

    return swapped([model], methods, "loss")


def is_own_step(model: keras.Model) -> bool:
    """Returns True if the training step is Keras's own, with a single update per step."""
    return is_of_keras(type(model), "train_step") and "train_step" not in vars(model)
