"""A run from its first step to its last, through however many stops.

The order at an epoch's end is what makes a stop at any moment harmless: the best weights are
saved, the log is pushed to the disk, then the checkpoint is saved that knows of both; only then
is anything older removed.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import ml_collections
import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd.lm import stream
from tfwd.lm.display import Display
from tfwd.lm.errors import UserError
from tfwd.lm.folder import RunFolder
from tfwd.lm.gradients import GradientMeter
from tfwd.lm.loop import Evaluation, Evaluator, perplexity
from tfwd.lm.metrics import Metrics
from tfwd.lm.optimizer import decaying, has_own_decay
from tfwd.lm.saved import make_model
from tfwd.lm.signals import Stopped, StopRequest
from tfwd.lm.state import RunState, fingerprint
from tfwd.lm.step import Failure, make_step
from tfwd.lm.throughput import ThroughputMeter


class Trainer:
    """Trains one model in one folder; what the folder holds is gone on with.

    Args:
        config: the whole configuration, checked.
        vocabulary_size: the number of tokens.
        texts: the numbered texts "train", "valid" and "test", int32 `[tokens]` each.
        folder: opened.
        display: shows the run.
        stop: looked at after every window.

    Raises:
        UserError: a text is too short, or the folder's checkpoints do not fit or are all broken.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        vocabulary_size: int,
        texts: dict[str, np.ndarray],
        folder: RunFolder,
        display: Display,
        stop: StopRequest,
    ):
        self.config, self.folder, self.display, self.stop = config, folder, display, stop
        data = config.data
        self._train = stream.columns(
            texts["train"], data.batch_size, window=data.window, what="the training text"
        )
        self._evaluated = {
            name: stream.columns(ids, data.eval_batch_size, what=f"the {name} text")
            for name, ids in texts.items()
        }
        self.model = make_model(config, vocabulary_size)
        self.state = RunState(
            self.model.zero_state(data.batch_size), config.optimizer.learning_rate
        )
        self.step = make_step(config, self.model, self.state)
        every = config.gradients.every
        self._gradients = GradientMeter(self.model, self.state) if every else None
        self._evaluator = Evaluator(self.model, data.eval_batch_size)
        self._objects = {
            "model": self.model,
            "optimizer": self.step.optimizer,
            "state": self.state,
        }
        self.progress = folder.restore(self._objects, fingerprint(texts), say=display.line)
        self._metrics: Metrics | None = None
        self._throughput = ThroughputMeter(wait=self.state.step.numpy)
        self._loss: float | None = None  # the last one that was logged
        self._saved_at = time.monotonic()

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train."""
        training = self.config.training
        return self.progress.finished(training.epochs, training.patience)

    @property
    def parameters(self) -> int:
        """The number of trained weights."""
        return sum(int(np.prod(v.shape)) for v in self.model.trainable_variables)

    def describe_optimizer(self) -> None:
        """Shows what is decayed, by how much and why, and the weights that no gradient reaches."""
        decay = decaying(self.step.optimizer)
        if decay is not None:
            self.display.line(str(decay.decay_table(self.model)))
        elif has_own_decay(self.config.optimizer.name):
            name = self.config.optimizer.name
            self.display.line(f"{name} decays nothing: optimizer.weight_decay is 0")
        self.step.trace()
        if self.step.unused:
            asked = decay is not None and decay.decay_unused
            kept = "they are only decayed" if asked else "they stay as they are"
            unused = ", ".join(self.step.unused)
            self.display.line(f"no gradient reaches these weights, {kept}: {unused}")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def train(self) -> None:
        """Trains until the epochs are done or the patience is over.

        Raises:
            Stopped: a signal came; a checkpoint was saved.
            UserError: a loss was not finite, or the disk is full; earlier checkpoints are kept.
        """
        self.folder.begin()
        if self._metrics is None:
            logs = self.folder.tensorboard if self.config.training.tensorboard else None
            length = self.progress.metrics_bytes
            self._metrics = Metrics(self.folder.metrics, length, logs, say=self.display.line)
        while not self.finished:
            self._epoch()

    def evaluate_best(self) -> dict[str, Evaluation]:
        """Reads the best weights and evaluates them on the three texts, without dropout.

        Raises:
            Stopped: a signal came.
            UserError: the best weights cannot be read.
        """
        step = self.progress.best_step
        if step:  # else no validation loss was ever finite
            problem = self.folder.best.problem(step)
            if problem:
                raise UserError(f"the best weights, {self.folder.best.path(step)}: {problem}")
            self.folder.best.read(step, {"model": self.model})
        return {name: self._evaluate(columns) for name, columns in self._evaluated.items()}

    def _epoch(self) -> None:
        progress, data = self.progress, self.config.data
        lengths = stream.window_lengths(
            self._train.shape[1] - 1,
            data.window,
            random=data.random_windows,
            seed=self.config.seed,
            epoch=progress.epoch,
        )
        title = f"epoch {progress.epoch + 1}/{self.config.training.epochs}"
        self.display.epoch(title, len(lengths), progress.window)
        for inputs, targets in stream.windows(self._train, lengths, first=progress.window):
            if self._gradients and progress.step % self.config.gradients.every == 0:
                record = {"kind": "gradient", "step": progress.step, "epoch": progress.epoch + 1}
                self._log_record({**record, **self._gradients(inputs, targets)})
            self.step(inputs, targets)
            self._throughput.step(int(lengths[progress.window]) * data.batch_size)
            progress.window += 1
            progress.step += 1
            if progress.step % self.config.training.log_steps == 0:
                self._log()
            self._show(lengths)
            if self.stop:
                self._save_and_stop()
            if self._due():
                self._save()
        self._end_epoch(title)

    def _end_epoch(self, title: str) -> None:
        self._settle(weights=True)
        try:
            with self._averaged():
                valid = self._evaluate(self._evaluated["valid"])
        except Stopped:
            self._save_and_stop()  # all windows done, no validation: it is made on the way back
        train_loss = self.state.take_epoch()
        rate = float(self.state.learning_rate.numpy())
        best = self.progress.end_epoch(valid.nats)
        averaging = self.step.averaging
        averaged = averaging is not None and averaging.triggered
        self._log_record(
            {
                "kind": "valid",
                "step": self.progress.step,
                "epoch": self.progress.epoch,
                "loss": valid.nats,
                "perplexity": valid.perplexity,
                "train_loss": train_loss,
                "train_perplexity": perplexity(train_loss),
                "learning_rate": rate,
                "best": best,
                **({} if averaging is None else {"averaged": averaged}),
            }
        )
        self.display.line(
            f"{title}  perplexity: train {perplexity(train_loss):.2f}, "
            f"valid {valid.perplexity:.2f}{' (averaged)' if averaged else ''}"
            f"{' (best)' if best else ''}"
        )
        if best:
            with self._averaged():
                self.folder.save_best(self.model, self.progress)
        if averaging is not None and averaging.observe(valid.nats):
            self.display.line("no better for a while: from now on the weights are averaged")
        training = self.config.training
        if self.progress.plateau(training.lr_decay_factor, training.lr_decay_patience):
            lower = max(rate * training.lr_decay_factor, training.min_learning_rate)
            if lower < rate:
                self.state.learning_rate.assign(lower)
                self.display.line(f"no better for a while: learning rate {rate:.4g} -> {lower:.4g}")
        self._save()

    def _averaged(self) -> AbstractContextManager[None]:
        """Within it the model has the averaged weights, once there are any."""
        averaging = self.step.averaging
        return nullcontext() if averaging is None else averaging.averaged()

    def _evaluate(self, columns: np.ndarray) -> Evaluation:
        window = self.config.data.eval_window
        result = self._evaluator(columns, window, stop=lambda: bool(self.stop))
        if result is None:
            raise self.stop.error()
        return result

    def _settle(self, weights: bool = False) -> None:
        """Ends a lap of training; stops the run if a step, or a weight, is not finite."""
        tokens, seconds = self._throughput.end_lap()
        self.progress.tokens += tokens
        self.progress.seconds += seconds
        failure = self.step.failure()
        if failure is None and weights and not all(map(math.isfinite, self._norms().values())):
            # A finite step can still take a weight out of range, which only the next would see.
            rate = float(self.state.learning_rate.numpy())
            norm = float(self.state.gradient_norm.numpy())
            failure = Failure(self.progress.step, math.nan, norm, rate)
        if failure is not None:
            self._fail(failure)

    def _fail(self, failure: Failure) -> NoReturn:
        norms = self._norms()
        self._log_record({"kind": "failure", **failure._asdict(), "norms": norms})
        steps = self.folder.checkpoints.steps()
        kept = f"the checkpoint of step {steps[-1]} is kept" if steps else "no checkpoint yet"
        clips = self.config.optimizer.clip_norm > 0
        clip = "optimizer.clip_norm" if clips else "clipping (optimizer.clip_norm is 0: off)"
        shown = ", ".join(f"{path} {norm:.4g}" for path, norm in norms.items())
        raise UserError(
            f"step {failure.step}: the loss, its gradient or a weight is not finite "
            f"(loss {failure.loss:.4g}, gradient norm {failure.gradient_norm:.4g}, "
            f"learning rate {failure.learning_rate:.4g}); norms of the weights: {shown}; "
            f"{kept}; a lower optimizer.learning_rate or {clip} may help"
        )

    def _log_record(self, record: dict[str, Any]) -> None:
        assert self._metrics is not None  # `train` has made it
        self._metrics.write(record)

    def _log(self) -> None:
        self._settle()
        self._loss = self.state.take_log()
        self._log_record(
            {
                "kind": "train",
                "step": self.progress.step,
                "epoch": self.progress.epoch + 1,
                "loss": self._loss,
                "perplexity": perplexity(self._loss),
                "learning_rate": float(self.state.learning_rate.numpy()),
                "gradient_norm": float(self.state.gradient_norm.numpy()),
                "tokens_per_second": self._throughput.tokens_per_second,
                "norms": self._norms(),
            }
        )
        self._throughput.step(0)

    def _norms(self) -> dict[str, float]:
        return {
            _keras.variables.path(v): float(tf.norm(_keras.variables.value(v)).numpy())
            for v in self.model.trainable_variables
        }

    def _show(self, lengths: np.ndarray) -> None:
        speed, left = self._throughput.tokens_per_second, None
        if speed:
            epochs = self.config.training.epochs - self.progress.epoch - 1
            steps = int(lengths[self.progress.window :].sum()) + epochs * int(lengths.sum())
            left = steps * self.config.data.batch_size / speed
        self.display.window(self.progress.window, self._loss, speed, left)

    def _due(self) -> bool:
        training = self.config.training
        if training.checkpoint_steps and self.progress.step % training.checkpoint_steps == 0:
            return True
        seconds = training.checkpoint_seconds
        return bool(seconds) and time.monotonic() - self._saved_at >= seconds

    def _save(self) -> None:
        self._settle(weights=True)
        assert self._metrics is not None
        self.progress.metrics_bytes = self._metrics.sync()
        self.folder.save(self._objects, self.progress, self.config.training.keep_checkpoints)
        self._saved_at = time.monotonic()

    def _save_and_stop(self) -> NoReturn:
        self._save()
        raise self.stop.error()
