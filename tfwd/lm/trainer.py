"""Trainer of the language model: windows of text, validation, moments of gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfwd.lm.data import text_windows
from tfwd.lm.evaluation import Evaluation, Evaluator
from tfwd.lm.gradient_moments import GradientMeter
from tfwd.lm.losses import PERPLEXITY
from tfwd.lm.model import make_model
from tfwd.lm.training_step import make_step
from tfwd.runs.storage.data_fingerprint import fingerprint
from tfwd.runs.storage.run_folder import RunFolder
from tfwd.runs.training import trainer
from tfwd.runs.training.display import Display
from tfwd.runs.training.step_variables import StepVariables
from tfwd.runs.training.stop_signals import StopRequest
from tfwd.runs.workers.worker_agreement import check_batch_size
from tfwd.runs.workers.worker_group import Workers


class Trainer(trainer.Trainer):
    """Trainer of a language model in one folder, which resumes from its checkpoints.

    Args:
        config: the whole checked configuration.
        vocabulary_size: int. The number of tokens.
        texts: dict of the token ids of "train", "valid" and "test", int32 `[tokens]` each.
        folder: the opened `RunFolder`.
        display: the display of the run.
        stop: the stop request, checked after every step.
        workers: the `Workers` that train together.

    Raises:
        UserError: a text is too short, or the folder's checkpoints do not fit or are all damaged.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        vocabulary_size: int,
        texts: dict[str, np.ndarray],
        folder: RunFolder,
        display: Display,
        stop: StopRequest,
        workers: Workers,
    ):
        data = config.data
        check_batch_size("data.batch_size", data.batch_size, workers)
        self._train = text_windows.columns(
            texts["train"], data.batch_size, window=data.window, what="the training text"
        )
        self._evaluated = {
            name: text_windows.columns(ids, data.eval_batch_size, what=f"the {name} text")
            for name, ids in texts.items()
        }
        model = make_model(config, vocabulary_size)
        state = StepVariables(model.zero_state(data.batch_size), config.optimizer.learning_rate)
        step = make_step(config, model, state, workers)
        self._gradients = GradientMeter(model, state) if config.gradients.every else None
        self._evaluator = Evaluator(model, data.eval_batch_size, workers)
        super().__init__(
            config, model, state, step, fingerprint(texts), folder, display, stop, PERPLEXITY
        )

    def epoch_sizes(self, epoch: int) -> np.ndarray:
        data = self.config.data
        self._lengths = text_windows.window_lengths(
            self._train.shape[1] - 1,
            data.window,
            random=data.random_windows,
            seed=self.config.seed,
            epoch=epoch,
        )
        return self._lengths * data.batch_size

    def epoch_batches(self, first: int) -> Iterator[tuple[tf.Tensor, ...]]:
        yield from text_windows.windows(self._train, self._lengths, first=first)

    def measure(self, *batch: tf.Tensor) -> dict[str, Any] | None:
        due = self._gradients and self.progress.step % self.config.gradients.every == 0
        if not self._gradients or not due:
            return None
        self.collect_carried()  # each worker measures the whole batch
        return self._gradients(*batch)

    def evaluate(self, name: str) -> Evaluation | None:
        columns, window = self._evaluated[name], self.config.data.eval_window
        return self._evaluator(columns, window, stop=lambda: bool(self.stop))

    def evaluate_best(self) -> dict[str, Evaluation]:
        """Reads the best weights, and evaluates them on the three texts without dropout.

        Raises:
            Stopped: a signal arrived.
            UserError: the best weights cannot be read.
        """
        self.read_best()
        return {name: self.evaluate_or_stop(name) for name in self._evaluated}
