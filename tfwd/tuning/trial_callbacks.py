"""Keras callbacks of a trial: a backup of its whole state, and the check of its objective."""

from __future__ import annotations

import json
import os
from typing import Any

import keras
import keras_tuner
from keras_tuner.errors import FatalValueError

from tfwd import _keras
from tfwd.atomic_files import write_atomically
from tfwd.tuning.stopwatch import Stopwatch


class FullState(keras.callbacks.BackupAndRestore):
    """`BackupAndRestore` that keeps its files after the end, and stores the history.

    The weights' file has the variables of the model and of its optimizer (moments, averages, step),
    and the counters of the draws. It does not have the order of shuffled data, or the state of
    callbacks.

    Args:
        folder: str. Path of a folder that only this run uses.

    Attributes:
        epochs: list of the logs of all epochs, including epochs before the run resumed.
        watch: the `Stopwatch` whose time is saved with each epoch.
    """

    def __init__(self, folder: str):
        super().__init__(folder, **_keras.training.BACKUP_ARGUMENTS)
        self._path = os.path.join(folder, "history.json")
        self.epochs: list[dict[str, float]] = []
        self.watch: Stopwatch | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        if os.path.exists(self._path):
            with open(self._path, encoding="utf-8") as file:
                self.epochs = json.load(file)
        # The history is written first. An epoch whose weights were not saved is trained again.
        self.epochs = self.epochs[: _keras.training.epochs_in_backup(self)]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.epochs.append({name: float(value) for name, value in (logs or {}).items()})
        os.makedirs(self.backup_dir, exist_ok=True)
        write_atomically(self._path, json.dumps(self.epochs))
        super().on_epoch_end(epoch, logs)
        if self.watch is not None:
            self.watch.save()

    def history(self) -> dict[str, list[float]]:
        """Returns the logs of all epochs, in the form of `History.history`."""
        names = dict.fromkeys(name for epoch in self.epochs for name in epoch)
        return {name: [e[name] for e in self.epochs if name in e] for name in names}


class HasObjective(keras.callbacks.Callback):
    """Callback that ends the search if the objective is not in the logs of an epoch.

    Args:
        objective: the objective of the search.
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
