"""State of a run besides model and optimizer, so that it resumes as if it never stopped.

`Progress` has the host's counters. It is written as JSON beside the tensors. `RunState` has the
variables that the training step changes on the device. Reading them needs a synchronisation, so the
host reads them only when it logs or saves.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

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

    def plateau(self, factor: float, patience: int) -> bool:
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


class RunState(tf.Module):
    """Variables that a training step changes, except the model's and the optimizer's variables.

    Args:
        states: the zero state of a recurrent model. A variable per tensor carries the state from
            window to window. Pass `[]` for other models.
        learning_rate: float. The base rate. A step may scale it.

    Attributes:
        learning_rate: float32 variable.
        carried: variables in the structure of `states`.
        step: int64 variable. The number of steps whose update was made.
        epoch_nats, epoch_tokens: float64 variables. Sums of losses and items over the epoch.
        log_nats, log_tokens: float64 variables. The same sums since the last log entry.
        gradient_norm: float32 variable. The norm of the last step, before clipping.

    Example:
    >>> state = RunState([], learning_rate=0.5)
    >>> _, _ = state.log_nats.assign(8.0), state.log_tokens.assign(4.0)
    >>> state.take_log()
    2.0
    >>> float(state.log_tokens)
    0.0
    """

    def __init__(self, states: Sequence[Sequence[tf.Tensor]], learning_rate: float):
        super().__init__()

        def variable(value: Any, dtype: Any) -> tf.Variable:
            return tf.Variable(value, trainable=False, dtype=dtype)

        self.learning_rate = variable(learning_rate, tf.float32)
        self.carried = [[variable(tensor, tensor.dtype) for tensor in pair] for pair in states]
        self.step = variable(0, tf.int64)
        self.epoch_nats = variable(0, tf.float64)
        self.epoch_tokens = variable(0, tf.float64)
        self.log_nats = variable(0, tf.float64)
        self.log_tokens = variable(0, tf.float64)
        self.gradient_norm = variable(0, tf.float32)

    def take_log(self) -> float:
        """Returns the mean loss since the last call, and starts a new mean."""
        return _take(self.log_nats, self.log_tokens)

    def take_epoch(self) -> float:
        """Returns the epoch's mean loss, and starts a new epoch with a carried state of zero."""
        for pair in self.carried:
            for tensor in pair:
                tensor.assign(tf.zeros_like(tensor))
        return _take(self.epoch_nats, self.epoch_tokens)


def fingerprint(texts: dict[str, np.ndarray]) -> str:
    """Returns a short hash of texts of token ids.

    A run resumes only with data of the same hash.
    """
    digest = hashlib.sha256()
    for name in sorted(texts):
        ids = np.ascontiguousarray(texts[name], "<i4")
        digest.update(f"{name} {len(ids)};".encode() + ids.tobytes())
    return digest.hexdigest()[:16]


def _take(nats: tf.Variable, tokens: tf.Variable) -> float:
    mean = float(nats.numpy() / tokens.numpy())
    nats.assign(0)
    tokens.assign(0)
    return mean
