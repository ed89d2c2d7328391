"""Runs a classifier on texts, without dropout."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfwd.finetune import scores
from tfwd.finetune.data.batches import by_length, pad
from tfwd.finetune.data.corpus import Encoded
from tfwd.runs.workers.worker_group import Workers


class Evaluation(NamedTuple):
    """Results of a classifier on labelled texts.

    Attributes:
        nats: float. The mean loss.
        confusion: the counts of `scores.confusion`.
        probabilities: float64 `[texts, classes]`.
    """

    nats: float
    confusion: np.ndarray
    probabilities: np.ndarray

    @property
    def accuracy(self) -> float:
        """Returns the share of correct predictions."""
        return scores.accuracy(self.confusion)

    @property
    def macro_f1(self) -> float:
        """Returns the mean of the classes' F1."""
        return scores.macro_f1(self.confusion)


class Predictor:
    """Logits of a classifier for texts of any length, traced once.

    Args:
        model: the model. It runs with `training=False`.
        padding_id: int. The padding token.
        batch_size: int. Texts per batch. Texts of similar length are in one batch.
        most: int. The maximum length of a text.
        workers: the `Workers` that divide the batches. A single process by default.
    """

    def __init__(
        self,
        model: Any,
        padding_id: int,
        batch_size: int,
        most: int,
        workers: Workers | None = None,
    ):
        self._workers = workers or Workers()
        self._model, self._padding = model, padding_id
        self._batch_size, self._most = batch_size, most
        signature = [tf.TensorSpec([None, None], tf.int32)]
        self._function = tf.function(
            lambda ids: model(ids, training=False), input_signature=signature
        )

    def __call__(
        self, texts: Sequence[np.ndarray], stop: Callable[[], bool] = lambda: False
    ) -> np.ndarray | None:
        """Computes the logits, float64 `[texts, classes]`. Returns `None` if `stop` ended it.

        Args:
            texts: the token ids of the texts. At least one text.
            stop: function that is called after each batch. `True` ends the prediction.
        """
        found: dict[int, np.ndarray] = {}
        stopped = False
        workers = self._workers
        for index, numbers in enumerate(by_length(texts, self._batch_size)):
            if index % workers.count != workers.index:
                continue
            batch = pad([texts[number] for number in numbers], self._padding, self._most)
            logits = self._function(tf.constant(batch)).numpy()
            found.update(zip(numbers.tolist(), logits.astype(np.float64), strict=True))
            if stop():
                stopped = True
                break
        for part in workers.gather(pickle.dumps((found, stopped))) if workers.count > 1 else ():
            others, other_stopped = pickle.loads(part)
            found.update(others)
            stopped = stopped or other_stopped
        if stopped:
            return None
        return np.stack([found[number] for number in range(len(texts))])


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Computes log softmax over the last axis, in float64."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def evaluate(
    predict: Predictor, data: Encoded, stop: Callable[[], bool] = lambda: False
) -> Evaluation | None:
    """Evaluates a classifier on labelled texts. Returns `None` if `stop` ended it."""
    logits = predict(data.ids, stop)
    if logits is None:
        return None
    with np.errstate(invalid="ignore"):  # the loss shows that a run diverges
        logs = log_probabilities(logits)
    nats = -logs[np.arange(len(logs)), data.labels].mean()
    table = scores.confusion(data.labels, logits.argmax(1), logits.shape[1])
    return Evaluation(float(nats), table, np.exp(logs))
