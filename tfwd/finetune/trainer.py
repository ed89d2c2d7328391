"""Trainer of a classifier: batches of texts, validation, scores."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfwd.finetune import pretrained_folder
from tfwd.finetune.data import batches
from tfwd.finetune.data.corpus import Corpus
from tfwd.finetune.evaluation import Evaluation, Predictor, evaluate
from tfwd.finetune.model import classifier_of, make_model, reinitialize
from tfwd.finetune.scores import LOSS
from tfwd.finetune.training_step import make_step
from tfwd.optimizers import DecoupledWeightDecay
from tfwd.optimizers._updates.decay_rules import DecayRow, DecayTable
from tfwd.runs.storage.run_folder import RunFolder
from tfwd.runs.training import trainer
from tfwd.runs.training.display import Display
from tfwd.runs.training.step_variables import StepVariables
from tfwd.runs.training.stop_signals import StopRequest
from tfwd.runs.workers.worker_agreement import check_batch_size
from tfwd.runs.workers.worker_group import Workers


class Trainer(trainer.Trainer):
    """Trainer of a classifier in one folder, which resumes from its checkpoints.

    The pretrained weights are read only at the start of a run. A resumed run reads a checkpoint.

    Args:
        config: the whole checked configuration.
        data: the labelled texts.
        folder: the opened `RunFolder`.
        display: the display of the run.
        stop: the stop request, checked after every step.
        workers: the `Workers` that train together.

    Raises:
        UserError: the weights do not fit, or the folder's checkpoints do not fit or are all
            damaged.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        data: Corpus,
        folder: RunFolder,
        display: Display,
        stop: StopRequest,
        workers: Workers,
    ):
        self._data = data
        check_batch_size("data.batch_size", config.data.batch_size, workers)
        train, vocabulary = data.encoded["train"], data.vocabulary
        self._sizes = batches.sizes(len(train.ids), config.data.batch_size)
        model = make_model(config, vocabulary)
        if not folder.checkpoints.steps():
            encoder = classifier_of(model).encoder
            missing = pretrained_folder.load_weights(encoder, config.model.pretrained)
            reinitialize(model, config.model.reinitialize_layers, missing, config.seed)
        state = StepVariables([], config.optimizer.learning_rate)
        step = make_step(config, model, state, len(self._sizes), workers)
        self._schedule = step
        self._predict = Predictor(
            model,
            vocabulary.padding_id,
            config.data.eval_batch_size,
            config.data.max_length,
            workers,
        )
        super().__init__(
            config, model, state, step, data.fingerprint(), folder, display, stop, LOSS
        )

    def epoch_sizes(self, epoch: int) -> np.ndarray:
        self._now = epoch
        return self._sizes

    def epoch_batches(self, first: int) -> Iterator[tuple[tf.Tensor, ...]]:
        train, data = self._data.encoded["train"], self.config.data
        order = batches.order(len(train.ids), self.config.seed, self._now)
        padding = self._data.vocabulary.padding_id
        for start in range(first * data.batch_size, len(order), data.batch_size):
            chosen = order[start : start + data.batch_size]
            ids = batches.pad([train.ids[n] for n in chosen], padding, data.max_length)
            yield tf.constant(ids), tf.constant(train.labels[chosen])

    def evaluate(self, name: str) -> Evaluation | None:
        return evaluate(self._predict, self._data.encoded[name], stop=lambda: bool(self.stop))

    def extra_metrics(self, found: Any) -> dict[str, float]:
        return {"accuracy": found.accuracy, "macro_f1": found.macro_f1}

    def learning_rate(self) -> float:
        return super().learning_rate() * float(self._schedule.factor())

    def decay_table(self, decay: DecoupledWeightDecay) -> DecayTable:
        """Returns the table of the decay, in which similar weights of several layers share a row.

        The decay is for `optimizer.learning_rate`, before the factors of schedule and layers.
        """
        first: dict[tuple, DecayRow] = {}
        for row in super().decay_table(decay):
            path = re.sub(r"layer_\d+", "layer_*", row.path)
            first.setdefault((path, row.decay, row.reason), row._replace(path=path))
        return DecayTable(first.values())

    def evaluate_best(self) -> dict[str, Evaluation]:
        """Reads the best weights, and evaluates them on the three parts without dropout.

        Raises:
            Stopped: a signal arrived.
            UserError: the best weights cannot be read.
        """
        self.read_best()
        return {name: self.evaluate_or_stop(name) for name in self._data.encoded}
