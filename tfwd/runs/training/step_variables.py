"""Variables that a training step changes on the device, besides model and optimizer.

A run saves them, so that it resumes as if it never stopped. Reading them needs a synchronisation,
so the host reads them only when it logs or saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class StepVariables(tf.Module):
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
    >>> state = StepVariables([], learning_rate=0.5)
    >>> _, _ = state.log_nats.assign(8.0), state.log_tokens.assign(4.0)
    >>> state.take_log_loss()
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

    def take_log_loss(self) -> float:
        """Returns the mean loss since the last call, and starts a new mean."""
        return _take(self.log_nats, self.log_tokens)

    def take_epoch_loss(self) -> float:
        """Returns the epoch's mean loss, and starts a new epoch with a carried state of zero."""
        for pair in self.carried:
            for tensor in pair:
                tensor.assign(tf.zeros_like(tensor))
        return _take(self.epoch_nats, self.epoch_tokens)


def _take(nats: tf.Variable, tokens: tf.Variable) -> float:
    mean = float(nats.numpy() / tokens.numpy())
    nats.assign(0)
    tokens.assign(0)
    return mean
