"""Whether what is searched for is measured at all, asked after the first epoch."""

from __future__ import annotations

from typing import Any

import keras
import keras_tuner
from keras_tuner.errors import FatalValueError


class HasObjective(keras.callbacks.Callback):
    """Ends the search if what it looks for is not in the logs of an epoch.

    Args:
        objective: of the search.
    """

    def __init__(self, objective: keras_tuner.Objective):
        super().__init__()
        self._objective = objective

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = logs or {}
        if self._objective.has_value(logs):
            return
        parts = getattr(self._objective, "objectives", [self._objective])
        names = ", ".join(repr(part.name) for part in parts if part.name not in logs)
        hint = "give `tuner` one of these as the objective"
        if not any(name.startswith("val_") for name in logs):
            hint = (
                "there is no validation in this epoch: give `search` validation_data=(x, y), and "
                "no validation_freq"
            )
        raise FatalValueError(
            f"the objective {names} is not in the logs, which have {', '.join(logs)}; {hint}"
        )
