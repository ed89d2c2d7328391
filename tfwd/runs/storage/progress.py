"""Progress of a run: the host's counters, which a checkpoint stores as JSON beside its tensors."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tfwd.runs.errors import UserError


@dataclasses.dataclass
class Progress:
    """Counters of a run: epochs, steps, seconds, and the best validation loss.

    Attributes:
        epoch: int. The number of finished epochs.
        window: int. The number of finished steps in the current epoch.
        step: int. The total number of training steps.
        tokens: int. The total number of tokens (or texts) trained on.
        seconds: float. The time spent in training steps.
        best_loss: float. The lowest validation loss.
        best_epoch: int. The epoch of the best loss, from 1; 0 for none yet.
        best_step: int. The step of the best loss.
        plateau_epochs: int. Epochs since the last best loss or the last decay of the learning rate.
        metrics_bytes: int. The length of `metrics.jsonl` at the checkpoint. Later lines are
            discarded.
        data: str. The fingerprint of the data.
        vocabulary: str. The vocabulary's fingerprint, which detects a checkpoint of another
            vocabulary.
    """

    epoch: int = 0
    window: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_loss: float = math.inf
    best_epoch: int = 0
    best_step: int = 0
    plateau_epochs: int = 0
    metrics_bytes: int = 0
    data: str = ""
    vocabulary: str = ""

    def end_epoch(self, valid_loss: float) -> bool:
        """Counts an epoch and its validation loss.

        Returns:
            True if the loss is the best so far. NaN never is.

        Example:
        >>> progress = Progress()
        >>> progress.end_epoch(5.0), progress.end_epoch(5.5)
        (True, False)
        >>> progress.best_epoch, progress.plateau_epochs
        (1, 1)
        """
        self.epoch += 1
        self.window = 0
        if valid_loss < self.best_loss:
            self.best_loss = valid_loss
            self.best_epoch = self.epoch
            self.best_step = self.step
            self.plateau_epochs = 0
            return True
        self.plateau_epochs += 1
        return False

    def reduces_learning_rate(self, factor: float, patience: int) -> bool:
        """Returns True if the learning rate must be reduced now. Then the count restarts.

        Args:
            factor: float. The factor of the learning rate; 1 disables the decay.
            patience: int. Epochs without a new best loss that make a plateau.
        """
        if factor == 1 or self.plateau_epochs < patience:
            return False
        self.plateau_epochs = 0
        return True

    def finished(self, epochs: int, patience: int = 0) -> bool:
        """Returns True if all epochs are done, or if `patience` epochs had no new best (0: off)."""
        if self.epoch >= epochs:
            return True
        return bool(patience) and self.window == 0 and self.epoch - self.best_epoch >= patience

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, with `None` for an infinite best loss (JSON has no infinity)."""
        fields = dataclasses.asdict(self)
        if math.isinf(self.best_loss):
            fields["best_loss"] = None
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Progress:
        """Returns the progress from the fields of `to_json`.

        Raises:
            UserError: the fields are from another version.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        fields = {"vocabulary": "", **fields}
        if set(fields) != names:
            different = ", ".join(sorted(set(fields) ^ names))
            raise UserError(f"the checkpoint was written by another version of tfwd ({different})")
        best = math.inf if fields["best_loss"] is None else fields["best_loss"]
        progress = cls(**{**fields, "best_loss": best})
        for name, default in dataclasses.asdict(cls()).items():
            value, kind = getattr(progress, name), type(default)
            if not isinstance(value, (int, float) if kind is float else kind) or (
                kind is not str and not value >= (-math.inf if name == "best_loss" else 0)
            ):
                raise UserError(f"the checkpoint's {name} is {value!r}, which is out of range")
        return progress
