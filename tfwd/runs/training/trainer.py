"""Training loop: epochs, validation, logs and checkpoints, with resuming after a stop.

A program's trainer defines the batches and the evaluation. The order at the end of an epoch makes a
stop safe at any moment. First the best weights are saved, then the log is written to the disk, then
the checkpoint that refers to both. Older files are removed last.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import ml_collections
import numpy as np

from tfwd.numerics.bad_step_report import Report
from tfwd.optimizers import DecoupledWeightDecay
from tfwd.runs.errors import UserError
from tfwd.runs.interfaces import EvaluationResult, Failure, Score, Step
from tfwd.runs.storage.file_access import write_file
from tfwd.runs.storage.metrics import Metrics
from tfwd.runs.storage.progress import Progress
from tfwd.runs.storage.run_folder import RunFolder
from tfwd.runs.training import weight_norms
from tfwd.runs.training.display import Display
from tfwd.runs.training.non_finite_steps import Divergence, report_text
from tfwd.runs.training.optimizer import find_weight_decay, has_own_decay
from tfwd.runs.training.step_variables import StepVariables
from tfwd.runs.training.stop_signals import Stopped, StopRequest
from tfwd.runs.training.throughput import ThroughputMeter
from tfwd.runs.workers import worker_agreement
from tfwd.runs.workers.stop_votes import Votes


class Trainer(abc.ABC):
    """Base class of trainers. Trains one model in one folder, and resumes from its checkpoints.

    A subclass defines `epoch_sizes`, `epoch_batches` and `evaluate`, and may define `measure`.

    Args:
        config: the whole checked configuration.
        model: a new model.
        state: the `StepVariables` that the step changes.
        step: the training step.
        data: str. The fingerprint of the data.
        folder: the opened `RunFolder`.
        display: the display of the run.
        stop: the stop request, checked after every step.
        score: how a loss is shown.

    Raises:
        UserError: the folder's checkpoints do not fit, or all of them are damaged.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        model: Any,
        state: StepVariables,
        step: Step,
        data: str,
        folder: RunFolder,
        display: Display,
        stop: StopRequest,
        score: Score,
    ):
        self.workers = step.workers  # only the chief writes
        self.config, self.folder, self.display, self.stop = config, folder, display, stop
        self.model, self.state, self.step, self.score = model, state, step, score
        self._objects = {"model": model, "optimizer": step.optimizer, "state": state}
        self.progress = self._restore(data)
        self._metrics: Metrics | None = None
        self._votes = Votes(self.workers, stop, self._checkpoint_is_due)
        self._throughput = ThroughputMeter(wait=state.step.numpy)
        self._divergence = Divergence(
            config.numerics.check, step, state, self._objects.values(), self._report_failure
        )
        self._loss: float | None = None  # the last logged loss
        self._saved_at = time.monotonic()

    @abc.abstractmethod
    def epoch_sizes(self, epoch: int) -> np.ndarray:
        """Returns the sizes of an epoch's batches, in the unit of the speed (tokens or texts)."""

    @abc.abstractmethod
    def epoch_batches(self, first: int) -> Iterable[tuple[Any, ...]]:
        """Yields the batches of the epoch of the last `epoch_sizes` call, from number `first`."""

    @abc.abstractmethod
    def evaluate(self, name: str) -> EvaluationResult | None:
        """Evaluates the model on a part of the data, such as "valid".

        Returns `None` if a stop was requested.
        """

    def measure(self, *batch: Any) -> dict[str, Any] | None:
        """Returns numbers of a batch to log before its step, or `None`."""
        return None

    def extra_metrics(self, found: EvaluationResult) -> dict[str, float]:
        """Returns further numbers of an evaluation to log and show, such as an accuracy."""
        return {}

    def learning_rate(self) -> float:
        """Returns the learning rate for the log."""
        return float(self.state.learning_rate.numpy())

    def collect_carried(self) -> None:
        """Gives each worker the state of all rows that is carried from window to window."""
        self.workers.collect(tensor for pair in self.state.carried for tensor in pair)

    def _restore(self, data: str) -> Progress:
        """Reads the newest complete checkpoint, which the chief chooses."""
        workers, objects, say = self.workers, self._objects, self.display.line
        found = workers.on_chief(lambda: self.folder.restore(objects, data, say))
        if found.step:
            return workers.together(
                lambda: found if workers.is_chief else self.folder.read(objects, found.step)
            )
        worker_agreement.copy_chief_weights(workers, self.model.weights, say)
        return found

    @property
    def finished(self) -> bool:
        """Returns True if nothing is left to train."""
        training = self.config.training
        return self.progress.finished(training.epochs, training.patience)

    @property
    def parameters(self) -> int:
        """Returns the number of trained weights."""
        return sum(int(np.prod(v.shape)) for v in self.model.trainable_variables)

    def decay_table(self, decay: DecoupledWeightDecay) -> Any:
        """Returns the table of the weights' decay to show."""
        return decay.decay_table(self.model)

    def describe_optimizer(self) -> None:
        """Shows how the weights are decayed, and which weights no gradient reaches."""
        decay = find_weight_decay(self.step.optimizer)
        if decay is not None:
            self.display.line(str(self.decay_table(decay)))
        elif has_own_decay(self.config.optimizer.name):
            name = self.config.optimizer.name
            self.display.line(f"{name} does not decay weights: optimizer.weight_decay is 0")
        self.step.trace()
        if self.step.unused:
            asked = decay is not None and decay.decay_unused
            kept = "they are only decayed" if asked else "they do not change"
            unused = ", ".join(self.step.unused)
            self.display.line(f"no gradient reaches these weights, {kept}: {unused}")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def train(self) -> None:
        """Trains until all epochs are done or the patience is exhausted.

        Raises:
            Stopped: a signal arrived; a checkpoint was saved.
            Diverged: a step was not finite.
            UserError: the disk is full; earlier checkpoints are kept.
        """
        self.workers.on_chief(self.folder.begin)
        if self._metrics is None and self.workers.is_chief:
            logs = self.folder.tensorboard if self.config.training.tensorboard else None
            length = self.progress.metrics_bytes
            self._metrics = Metrics(self.folder.metrics, length, logs, say=self.display.line)
        if self.progress.step:
            self._divergence.take_snapshot()
        while not self.finished:
            self._epoch()

    def read_best(self) -> None:
        """Reads the best weights into the model, if there are any.

        Raises:
            UserError: the best weights cannot be read.
        """
        self.workers.together(self._read_best)

    def _read_best(self) -> None:
        step = self.progress.best_step
        if step:  # else no validation loss was finite
            problem = self.folder.best.problem(step)
            if problem:
                raise UserError(f"the best weights, {self.folder.best.path(step)}: {problem}")
            self.folder.best.read(step, {"model": self.model})

    def evaluate_or_stop(self, name: str) -> Any:
        """Evaluates as `evaluate` does, and raises an exception if a stop was requested.

        Raises:
            Stopped: a signal arrived.
        """
        result = self.evaluate(name)
        if result is None:
            self._votes.agree_on_stop()
            raise self.stop.error()
        return result

    def _epoch(self) -> None:
        progress = self.progress
        sizes = self.epoch_sizes(progress.epoch)
        title = f"epoch {progress.epoch + 1}/{self.config.training.epochs}"
        self.display.epoch(title, len(sizes), progress.window)
        due = False
        for batch in self.epoch_batches(progress.window):
            found = self.measure(*batch)
            if found is not None:
                record = {"kind": "gradient", "step": progress.step, "epoch": progress.epoch + 1}
                self._log_record({**record, **found})
            # Checkpoints are saved only after updates, when no gradients are accumulated.
            updates = self._updates(progress.window, len(sizes))
            self._votes.cast(progress.step + 1)
            self.step(*batch, **({} if updates else {"update": False}))
            due |= self._votes.saves(progress.step + 1)
            self._throughput.step(int(sizes[progress.window]))
            progress.window += 1
            progress.step += 1
            if self._divergence.checks_each_step:
                self._check_step()
            if progress.step % self.config.training.log_steps == 0:
                self._log()
            self._show_progress(sizes)
            if updates and self._votes.stops():
                self._save_and_stop()
            if due and updates:
                self._save()
                due = False
        self._end_epoch(title)

    def _updates(self, window: int, windows: int) -> bool:
        """Returns True if a step of the epoch makes an update. The last step always does."""
        return window + 1 == windows or (window + 1) % self.config.optimizer.steps_per_update == 0

    def _end_epoch(self, title: str) -> None:
        self._close_lap_and_check(weights=True)
        steps = self.progress.window
        try:
            with self._averaged():
                found = self.evaluate_or_stop("valid")
        except Stopped:
            self._save_and_stop()  # all steps are done; the validation is made when the run resumes
        valid, further = found.nats, self.extra_metrics(found)
        train_loss = self.state.take_epoch_loss()
        rate = float(self.state.learning_rate.numpy())
        best = self.progress.end_epoch(valid)
        averaging = self.step.averaging
        averaged = averaging is not None and averaging.triggered
        name, of_loss, _ = self.score
        self._log_record(
            {
                "kind": "valid",
                "step": self.progress.step,
                "epoch": self.progress.epoch,
                "loss": valid,
                name: of_loss(valid),
                "train_loss": train_loss,
                f"train_{name}": of_loss(train_loss),
                **further,
                "learning_rate": self.learning_rate(),
                "best": best,
                **({} if averaging is None else {"averaged": averaged}),
            }
        )
        shown = [f", {what.replace('_', ' ')} {value:.1%}" for what, value in further.items()]
        self.display.line(
            f"{title}  {name}: train {of_loss(train_loss):.2f}, "
            f"valid {of_loss(valid):.2f}{' (averaged)' if averaged else ''}"
            f"{''.join(shown)}"
            f"{' (best)' if best else ''}"
        )
        if best:
            with self._averaged():
                self.workers.on_chief(self._save_best)
        if averaging is not None and averaging.observe(valid):
            self.display.line("no improvement: from now on the weights are averaged")
        training = self.config.training
        if self.progress.reduces_learning_rate(
            training.lr_decay_factor, training.lr_decay_patience
        ):
            lower = max(rate * training.lr_decay_factor, training.min_learning_rate)
            if lower < rate:
                self.state.learning_rate.assign(lower)
                self.display.line(f"no improvement: learning rate {rate:.4g} -> {lower:.4g}")
        self._divergence.take_snapshot(steps)
        self._save()

    def _averaged(self) -> AbstractContextManager[None]:
        """Returns a context in which the model has the averaged weights, once there are any."""
        averaging = self.step.averaging
        return nullcontext() if averaging is None else averaging.averaged()

    def _close_lap_and_check(self, weights: bool = False) -> None:
        """Ends a lap of training, then checks the steps, and optionally the weights."""
        tokens, seconds = self._throughput.end_lap()
        self.progress.tokens += tokens
        self.progress.seconds += seconds
        self._check_step(weights)

    def _check_step(self, weights: bool = False) -> None:
        """Reacts if a step, or a weight, is not finite."""
        if self._divergence.action == "off":
            return
        failure, batch = self.step.failure(), None
        if failure is not None:
            late = self.progress.step - failure.step  # later steps, which were not made
            batch = next(iter(self.epoch_batches(self.progress.window - 1 - late)))
        elif weights:
            failure = weight_norms.failure(self.model, self.state, self.progress.step, self._loss)
        if failure is not None:
            self._divergence.handle(failure, batch, self._failure_hint())

    def _failure_hint(self) -> str:
        steps = self.folder.checkpoints.steps()
        kept = f"the checkpoint of step {steps[-1]} is kept" if steps else "no checkpoint yet"
        clips = self.config.optimizer.clip_norm > 0
        clip = "optimizer.clip_norm" if clips else "clipping (optimizer.clip_norm is 0: off)"
        return (
            f"a lower optimizer.learning_rate or {clip} may help; {kept}; the report is in "
            f"{self._report_path}"
        )

    @property
    def _report_path(self) -> Path:
        return self.folder.report / "non_finite.txt"

    def _report_failure(self, failure: Failure, report: Report | None, done: str) -> None:
        """Logs, shows and stores the report of a step that was not finite."""
        norms = weight_norms.norms(self.model)
        numbers = {"loss", "gradient_norm", "learning_rate", "step"}
        record = {name: value for name, value in failure._asdict().items() if name in numbers}
        self._log_record({"kind": "failure", **record, "norms": norms})
        text = report_text(failure, report, norms)
        if self._metrics is not None:
            self._metrics.text("non_finite", text, failure.step)
            self._report_path.parent.mkdir(exist_ok=True)
            write_file(self._report_path, text)
        if done != "the run ends":
            self.display.line(f"{report.sentence if report else text}: {done}")

    def _log_record(self, record: dict[str, Any]) -> None:
        if self._metrics is not None:  # only the chief has metrics
            self._metrics.write(record)

    def _log(self) -> None:
        self._close_lap_and_check()
        self._loss = self.state.take_log_loss()
        self._log_record(
            {
                "kind": "train",
                "step": self.progress.step,
                "epoch": self.progress.epoch + 1,
                "loss": self._loss,
                self.score.name: self.score.of_loss(self._loss),
                "learning_rate": self.learning_rate(),
                "gradient_norm": float(self.state.gradient_norm.numpy()),
                "tokens_per_second": self._throughput.tokens_per_second,
                "norms": weight_norms.norms(self.model),
            }
        )
        self._throughput.step(0)

    def _show_progress(self, sizes: np.ndarray) -> None:
        speed, left = self._throughput.tokens_per_second, None
        if speed:
            epochs = self.config.training.epochs - self.progress.epoch - 1
            left = (int(sizes[self.progress.window :].sum()) + epochs * int(sizes.sum())) / speed
        self.display.window(self.progress.window, self._loss, speed, left)

    def _checkpoint_is_due(self, step: int) -> bool:
        training = self.config.training
        if training.checkpoint_steps and step % training.checkpoint_steps == 0:
            return True
        seconds = training.checkpoint_seconds
        return bool(seconds) and time.monotonic() - self._saved_at >= seconds

    def _save(self) -> None:
        self._close_lap_and_check(weights=True)
        self.collect_carried()
        self.workers.on_chief(self._save_checkpoint)
        self._saved_at = time.monotonic()

    def _save_checkpoint(self) -> None:
        assert self._metrics is not None  # `train` made it
        self.progress.metrics_bytes = self._metrics.sync()
        self.folder.save(self._objects, self.progress, self.config.training.keep_checkpoints)

    def _save_best(self) -> None:
        self.folder.save_best(self.model, self.progress)

    def _save_and_stop(self) -> NoReturn:
        self._save()
        raise self.stop.error()
