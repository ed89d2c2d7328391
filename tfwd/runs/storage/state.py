"""The state of a run besides model and optimizer, by which it goes on as if it never stopped.

`Progress` is what the host counts; it is written as JSON beside the tensors.
`RunState` is what the training step changes on the device: reading it costs a synchronisation,
so the host looks at it only when it logs or saves.
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
    """Where a run stands.

    Attributes:
        epoch: the finished epochs.
        window: the finished windows of the epoch under way.
        step: the training steps in all.
        tokens: the tokens trained on, in all.
        seconds: the time spent in training steps.
        best_loss: the lowest validation loss, nats per token.
        best_epoch: the epoch it came after, from 1; 0 for none yet.
        best_step: the step it came after.
        plateau_epochs: epochs without a new best since the last one or the last decay.
        metrics_bytes: the length of `metrics.jsonl`: what is behind it belongs to no checkpoint.
        data: a fingerprint of the numbered text.
        vocabulary: the vocabulary's fingerprint, by which a checkpoint beside another one is known.
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
            Whether the loss is the best so far; a NaN never is.

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
        """Whether the learning rate is to fall now; begins to count anew if so.

        Args:
            factor: what it falls by; 1 is never.
            patience: epochs without a new best that make a plateau.
        """
        if factor == 1 or self.plateau_epochs < patience:
            return False
        self.plateau_epochs = 0
        return True

    def finished(self, epochs: int, patience: int = 0) -> bool:
        """Whether all epochs are done, or `patience` epochs (0: no limit) brought no new best."""
        if self.epoch >= epochs:
            return True
        return bool(patience) and self.window == 0 and self.epoch - self.best_epoch >= patience

    def to_json(self) -> dict[str, Any]:
        """The fields, with `None` for a best loss that is not there yet (JSON has no infinity)."""
        fields = dataclasses.asdict(self)
        if math.isinf(self.best_loss):
            fields["best_loss"] = None
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Progress:
        """The reverse of `to_json`.

        Raises:
            UserError: the fields are those of another version.
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
                raise UserError(f"the checkpoint's {name} is {value!r}: no progress has that")
        return progress


class RunState(tf.Module):
    """The variables that a training step changes, besides the model's and the optimizer's.

    Args:
        states: a recurrent model's zero state; each tensor's variable carries it from window to
            window. Other models have none: `[]`.
        learning_rate: the base rate, before any scale of a single step.

    Attributes:
        learning_rate: float32.
        carried: as `states`.
        step: int64, the steps whose update was made.
        epoch_nats, epoch_tokens: float64 sums over the epoch.
        log_nats, log_tokens: float64 sums since the last line of the log.
        gradient_norm: float32, the last step's, before clipping.

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
        """The mean loss since the last call, nats per token; begins a new mean."""
        return _take(self.log_nats, self.log_tokens)

    def take_epoch(self) -> float:
        """The epoch's mean loss; begins a new epoch, with the carried state at zero."""
        for pair in self.carried:
            for tensor in pair:
                tensor.assign(tf.zeros_like(tensor))
        return _take(self.epoch_nats, self.epoch_tokens)


def fingerprint(texts: dict[str, np.ndarray]) -> str:
    """A short hash of numbered texts: whether a run goes on with the text it began with."""
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
