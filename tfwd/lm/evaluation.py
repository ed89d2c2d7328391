"""Evaluates a model on a text, with the state carried from window to window.

The function is traced once, because its signature leaves the window's length unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfwd.lm.data import text_windows
from tfwd.lm.losses import perplexity, token_nats
from tfwd.lm.model import LanguageModel
from tfwd.runs.workers.worker_group import Workers


class Evaluation(NamedTuple):
    """Mean loss over a text.

    Attributes:
        nats: float. The mean loss in nats per token. Every token counts once.
        tokens: int. The number of predicted tokens.
    """

    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Returns exp(nats)."""
        return perplexity(self.nats)

    @property
    def bits(self) -> float:
        """Returns the bits per token."""
        return self.nats / math.log(2)


class Evaluator:
    """Evaluation of a model on columns of text, with the state carried from window to window.

    Args:
        model: the model. It runs with `training=False`.
        batch_size: int. The number of columns.
        workers: the `Workers` that divide the columns. A single process by default.
    """

    def __init__(self, model: LanguageModel, batch_size: int, workers: Workers | None = None):
        self.model, self.workers = model, workers or Workers()
        self._first, self._end = self.workers.rows(batch_size)
        batch_size = self._end - self._first
        zeros = model.zero_state(batch_size)
        self._carried = [[tf.Variable(t, trainable=False) for t in pair] for pair in zeros]
        self._nats = tf.Variable(0, dtype=tf.float64, trainable=False)
        window = tf.TensorSpec([batch_size, None], tf.int32)
        self.function = tf.function(self._window, input_signature=[window, window])

    def __call__(
        self, columns: np.ndarray, window: int, stop: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """Computes the mean loss over all of `columns`.

        Args:
            columns: int32 `[batch_size, n + 1]`, from `text_windows.columns`.
            window: int. Steps per call. It affects the memory, but not the result.
            stop: function that is called after each window. `True` ends the evaluation.

        Returns:
            The evaluation, or `None` if `stop` ended it.
        """
        stopped = False
        own = columns[self._first : self._end]
        if len(own):
            stopped = self._add(own, window, stop)
        nats = float(self._nats.numpy()) if len(own) else 0.0
        nats, tokens, stops = self.workers.total([nats, own.shape[0] * (own.shape[1] - 1), stopped])
        return None if stops else Evaluation(nats / tokens, int(tokens))

    def _add(self, columns: np.ndarray, window: int, stop: Callable[[], bool]) -> bool:
        """Sums the losses of columns. Returns True if `stop` ended the evaluation."""
        for pair in self._carried:
            for tensor in pair:
                tensor.assign(tf.zeros_like(tensor))
        self._nats.assign(0)
        lengths = text_windows.window_lengths(columns.shape[1] - 1, window, random=False)
        for inputs, targets in text_windows.windows(columns, lengths):
            self.function(inputs, targets)
            if stop():
                return True
        return False

    def _window(self, inputs: tf.Tensor, targets: tf.Tensor) -> None:
        carried = [[tensor.read_value() for tensor in pair] for pair in self._carried]
        output = self.model(inputs, states=carried, training=False)
        for old, new in zip(self._carried, output.states, strict=True):
            for variable, value in zip(old, new, strict=True):
                variable.assign(value)
        nats = token_nats(output.logits, targets)
        self._nats.assign_add(tf.reduce_sum(tf.cast(nats, tf.float64)))


def evaluate(
    model: LanguageModel,
    ids: np.ndarray,
    batch_size: int,
    window: int,
    what: str = "the text",
    workers: Workers | None = None,
) -> Evaluation:
    """Computes the mean loss of a model on a text of token ids.

    Args:
        model: the model.
        ids: int32 `[tokens]`.
        batch_size: int. The number of columns, each of which starts with the zero state. With 1,
            every token except the first is predicted from all tokens before it.
        window: int. Steps per call.
        what: str. The text's name for an error message.
        workers: the `Workers` that divide the columns. A single process by default.

    Returns:
        The mean loss in nats per token, and the number of predicted tokens.

    Raises:
        UserError: the text is too short for the batch size.

    Example:
    >>> model = LanguageModel(5, embedding_dim=2, hidden_units=(2,))
    >>> model.set_weights([0 * weight for weight in model.get_weights()])
    >>> round(evaluate(model, np.arange(10) % 5, batch_size=2, window=3).perplexity, 6)
    5.0
    """
    columns = text_windows.columns(ids, batch_size, what=what)
    evaluation = Evaluator(model, batch_size, workers)(columns, window)
    assert evaluation is not None
    return evaluation
