"""`FiniteCheck`: a callback that stops, skips or restores if a step of `fit` is not finite."""

from __future__ import annotations

import copy
import inspect
import math
import os
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import training as _keras_training
from tfwd.callbacks.bad_step_reaction import BadStepReaction, logs_after_bad_step, metric_results
from tfwd.callbacks.train_function import innermost, replace_innermost
from tfwd.numerics import worker_reports
from tfwd.numerics.bad_step_policy import BadStepPolicy
from tfwd.numerics.bad_step_report import Report
from tfwd.numerics.causes.evidence import STEP
from tfwd.numerics.checked_step import CheckedStep, Outcome, plain_step
from tfwd.numerics.checked_tensors import Frame
from tfwd.numerics.diagnosis import Diagnosis
from tfwd.numerics.epoch_snapshot import EpochSnapshot
from tfwd.numerics.layers_by_pattern import Patterns
from tfwd.numerics.non_finite_variables import is_state, non_finite_paths
from tfwd.numerics.tensorboard_and_plot_files import Log, check_plot
from tfwd.optional_packages import require

ACTIONS = ("raise", "skip", "restore")


class FiniteCheck(keras.callbacks.Callback):
    """Callback that finds the first non-finite tensor in `fit`, before it changes the weights.

    A step is applied only if all checked tensors are finite: the batch, the inputs and outputs of
    layers, the loss, the gradients of weights and the learning rate. The new state of a layer, such
    as BatchNormalization's moving variance, is not checked in a step: it may become infinite. The
    state of layers is checked when training begins. If a step is not applied, the weights, the
    optimizer's slots, BatchNormalization's statistics, generator states and metrics keep their
    values from before the step, bit for bit. The callback then examines the batch again, tensor by
    tensor. Its report names the first non-finite layer, the direction (forward or backward), the
    number of non-finite elements, and the likely cause.

    The callback works in eager mode, in graphs, with `jit_compile=True` and under MirroredStrategy.
    A step that is bad on one replica is bad on all replicas. With `steps_per_execution=k`, the k
    steps run one after the other, and each step is checked. A step is not an error if a
    `LossScaleOptimizer` only lowers its scale. `scaled_down` counts these steps. Saved models do
    not contain the callback.

    Without a bad step, training gives the same results as without the callback: bit for bit in
    eager mode, and in graphs for most models. The exceptions are:

    - in graphs: SGD, and noise in a custom layer. On Keras 2 also RMSprop, and attention with a
      mask, where sums differ by about 2e-6 relative;
    - in graphs: models such as MobileNetV2 and ResNet50. Without the callback, TensorFlow's graph
      optimizer rewrites operations whose results the callback reads. On small images, ResNet50
      makes a loss that differs by a tenth from this;
    - in all modes: a custom layer whose output is used by its own `add_loss` and by several other
      operations. TensorFlow then adds the gradients in another order;
    - under XLA: about half of Keras's optimizers. The compiler groups products and sums
      differently, which changes last bits;
    - in graphs on Keras 2: `Dropout` with a seed and `steps_per_execution` above 1. The seed
      depends on the number of traces;
    - in graphs on Keras 3: a dataset of unknown length. Without the callback, Keras counts an
      update too many in `optimizer.iterations` at the end of each epoch, and draws once more from
      the generators of `Dropout` and other layers.

    Only the innermost of several `FiniteCheck`s in one `fit` acts: the one that is last in the list
    of callbacks. A copy by `copy.deepcopy` is a new callback with the same arguments.

    Layers that draw with TensorFlow's stateful operations draw again after a skipped step, and in
    eager mode after a logged step. With `every_n_steps` above 1, checked and unchecked steps draw
    separately. Examples are Dropout on Keras 2 and `tf.random.normal`.

    Args:
        action: str. Reaction to a bad step. "raise" raises `tfwd.numerics.NonFiniteError`. "skip"
            continues with the next batch. It raises the error too if an operation fails on NaN, as
            a metric that uses labels as indices. "restore" restores the weights, the optimizer's
            state and all other variables from the end of the last epoch, and continues with the
            next batch. The values are stored when all callbacks have begun the next epoch. A
            callback such as Keras's `SwapEMAWeights`, which exchanges weights between epochs, may
            therefore be anywhere in the list of callbacks. The new learning rate is `factor` times
            the lower of two rates: the rate of the step and the rate at the end of that epoch.
            Metrics are not restored: the metrics of an epoch include only its good steps. A bad
            step in the first epoch raises the error, because there is nothing to restore. If all
            steps of an epoch are bad, its metrics are NaN for the callbacks after this one: give
            this callback first. Default "raise".
        every_n_steps: int. Check one step in every N, and the first step of each `fit`. The other
            steps are Keras's own steps, without a check and its cost. They may make weights
            non-finite. Default 1.
        history: int. Number of tensors that a report shows before the first non-finite one, and of
            earlier steps whose gradients it compares. Default 20.
        log_dir: path of a folder for TensorBoard, or None. The text tab shows the reports. The
            image tab shows the plot. Every `log_every_n_steps` steps, the callback writes scalars:
            the absolute mean of each output, weight and gradient, the percentage of zeros, and the
            ratio of update to weight. It also writes histograms. For these numbers the batch runs
            once more. With `every_n_steps`, the next checked step is logged. On several replicas
            the numbers belong to the first replica. The loss of a replica is divided by the
            number of replicas. Default None.
        plot: path of a file (`.png`, `.svg`, ..), or None. The plot shows tensors by steps. The
            color is log10 of the largest absolute value. The plot is drawn at the end of training
            and after each bad step. With `plot` or `log_dir`, each step reads each tensor once
            more. Default None.
        max_consecutive: int. The number of consecutive bad steps to skip. For "restore", how often
            the same epoch is restored, also with good steps between the bad ones. The next bad
            step raises the error. Default 5.
        factor: float. The factor of the learning rate for "restore". Default 0.5.
        log_every_n_steps: int. See `log_dir`. Default 100.
        exclude: regular expression, or a list of them. Layers or weights that may be non-finite,
            for example a layer that makes a mask of -infinity, with its weights. A pattern must
            match the full path or its last components. `x` and `y` are the names of the batch.
            Default None.

    Attributes:
        reports: list of the `Report` of each bad step.
        skipped: int. The number of skipped steps.
        scaled_down: int. The number of steps that only lowered the scale of the loss.

    Raises:
        ValueError: If an argument is wrong. When training starts: if a file or folder cannot be
            written; if `action` is "restore" and the learning rate is a schedule, which cannot be
            multiplied; or under ParameterServerStrategy, whose workers make steps independently.
        tfwd.numerics.NonFiniteError: In `fit`. See `action`.

    Example:
    >>> import keras, numpy as np
    >>> from tfwd import callbacks, numerics
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="score")])
    >>> model.compile("sgd", "mse")
    >>> x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    >>> x[2, 1] = np.nan
    >>> try:
    ...     model.fit(x, y, verbose=0, callbacks=[callbacks.FiniteCheck()])
    ... except numerics.NonFiniteError as error:
    ...     print(error.report.sentence)
    data 'x': 12.50 % non-finite elements (1 NaN, 0 +Inf, 0 -Inf of 8), step 1 (epoch 1, batch 1)
    """

    def __init__(
        self,
        action: str = "raise",
        every_n_steps: int = 1,
        history: int = 20,
        log_dir: str | os.PathLike[str] | None = None,
        plot: str | os.PathLike[str] | None = None,
        max_consecutive: int = 5,
        factor: float = 0.5,
        log_every_n_steps: int = 100,
        exclude: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if action not in ACTIONS:
            raise ValueError(f"action={action!r}: give one of {', '.join(map(repr, ACTIONS))}")
        for name, value, least in (
            ("every_n_steps", every_n_steps, 1),
            ("history", history, 0),
            ("max_consecutive", max_consecutive, 0),
            ("log_every_n_steps", log_every_n_steps, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r}: give a whole number of at least {least}")
        if not isinstance(factor, (int, float)) or not 0.0 < factor <= 1.0:
            raise ValueError(f"factor={factor!r}: give a number above 0, and at most 1")
        for name, path in (("log_dir", log_dir), ("plot", plot)):
            if path is not None and (not isinstance(path, (str, os.PathLike)) or not str(path)):
                raise ValueError(f"{name}={path!r}: give a path")
        if log_dir is not None:
            require("tensorboard", "FiniteCheck(log_dir=...)", "tensorboard")
        for name, path in (("log_dir", log_dir), ("plot", plot)):
            if path is not None:  # the log contains the plot too
                require("matplotlib", f"FiniteCheck({name}=...)", "plots")
        if plot is not None:
            check_plot(plot)
        self._patterns = Patterns("FiniteCheck", exclude=exclude)
        self.action, self.every_n_steps, self.history = action, every_n_steps, history
        self.max_consecutive, self.factor = max_consecutive, factor
        self.log_dir, self.plot, self.log_every_n_steps = log_dir, plot, log_every_n_steps
        self.exclude = exclude
        self.reports: list[Report] = []
        self.skipped = self.scaled_down = 0
        self._step = 0
        self._epoch = 0, 0  # numbers of steps and of bad steps before the epoch
        self._epoch_number = 1
        self._is_first, self._begun = True, False
        self._left_out: frozenset[str] | None = None  # paths of weights that are not checked
        self._past: deque[dict[str, float]] = deque(maxlen=max(history, 1))
        self._fitted: Any = None
        self._check: CheckedStep | None = None
        self._exact: CheckedStep | None = None
        self._diagnosis: Diagnosis | None = None
        self._plain: Any = None
        self._log: Log | None = None
        self._due: int | None = None  # number of the next step to log
        self._own: Any = None
        self._traced: Any = None  # the function that Keras traced for `_own`
        self._check_of: Any = None  # the training function that `_check` belongs to
        self._logs: Any = None
        self._policy = self._new_policy()
        self._snapshot: EpochSnapshot | None = None
        self._reaction: BadStepReaction | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> FiniteCheck:
        """Returns a new callback with the same arguments, for example for a trial of KerasTuner."""
        names = inspect.signature(FiniteCheck.__init__).parameters
        same = {name: getattr(self, name) for name in names if name != "self"}
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        FiniteCheck.__init__(new, **same)
        own = {k: v for k, v in vars(self).items() if k not in vars(new)}  # of a subclass
        new.__dict__.update(copy.deepcopy(own, memo))
        return new

    def on_train_begin(self, logs: Any = None) -> None:
        """Replaces the model's training step with the checked step."""
        self._put_back()  # an interrupted `fit` did not restore it
        self._end_interrupted_checks()
        model = self.model
        if model.built:
            self._patterns.check(model, "x", "y", "sample_weight")
        if isinstance(
            model.distribute_strategy, tf.distribute.experimental.ParameterServerStrategy
        ):
            raise ValueError(
                "FiniteCheck does not work under ParameterServerStrategy, because its workers make "
                "steps independently: use tfwd.optimizers.ApplyIfFinite"
            )
        if self._fitted is not model:
            self.reports, self.skipped, self.scaled_down = [], 0, 0
            self._step, self._fitted, self._due = 0, model, None
        self._past.clear()
        self._is_first, self._left_out = True, None
        self._policy, self._snapshot = self._new_policy(), None
        self._install()

    def _install(self) -> None:
        """Replaces the model's training step with the checked step."""
        model = self.model
        if self.action == "restore" and self._snapshot is None:
            self._snapshot = EpochSnapshot(model, self._policy, self._checks_weight)
        if self.log_dir is not None or self.plot is not None:
            log_dir, plot = (
                None if path is None else _keras.own_path(path, model)
                for path in (self.log_dir, self.plot)
            )
            self._log = Log(model, log_dir, plot, self.log_every_n_steps, self._due)
        self._reaction = BadStepReaction(
            self._policy,
            self._snapshot,
            self._log,
            self._bad_weights,
            self.every_n_steps == 1,
            self._put_back,
        )
        self._own = replace_innermost(model, self._train)
        self._traced = _keras_training.replace_traced_function(model, None)
        if self._check is None or self._check_of is not self._own:  # new, or compiled again
            self._check = self._checked_step()
            self._exact = self._plain = self._diagnosis = None
            self._check_of = self._own

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Records that `fit` with this callback makes the next call of the training function.

        A callback may call `fit` on the same model. If this inner `fit` has another `FiniteCheck`,
        it has put back the model's own step, since this `fit` could be an interrupted one.
        """
        self._begun = True
        if self._own is None:
            self._install()

    def on_train_end(self, logs: Any = None) -> None:
        """Restores the model's own training step."""
        self._put_back()
        # This frees the stored values.
        self._policy, self._snapshot, self._reaction = self._new_policy(), None, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Stores the step at which the epoch starts."""
        self._epoch = self._step, len(self.reports)
        self._epoch_number = epoch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stores the learning rates at the end of the epoch, for "restore".

        If all steps of an epoch are bad, its loss is set to NaN. Keras would report 0, the best
        possible loss.
        """
        steps, bad = self._steps_of_epoch()
        if bad < steps or not bad:
            if self._snapshot is not None:
                self._snapshot.end_epoch()
            return
        if logs:
            metrics = {*metric_results(self.model), *(self._logs or ())}
            logs.update({key: math.nan for key in logs if key in metrics})
        why = (
            "Skipped steps change no weight, so the same batches will be skipped again"
            if self._snapshot is None
            else "The next epoch starts from the restored state"
        )
        warnings.warn(
            f"FiniteCheck: all {steps} steps of epoch {epoch + 1} were bad. {why}", stacklevel=2
        )

    def _steps_of_epoch(self) -> tuple[int, int]:
        """Returns the numbers of completed steps and of bad steps of this epoch."""
        return self._step - self._epoch[0], len(self.reports) - self._epoch[1]

    def _new_policy(self) -> BadStepPolicy:
        return BadStepPolicy(self.action, self.max_consecutive, self.factor)

    def _put_back(self) -> None:
        if self._own is not None:
            replace_innermost(self.model, self._own)
            _keras_training.replace_traced_function(self.model, self._traced)
        if self._log is not None:
            self._log.close(self._step)
            self._due = self._log.due
        self._log = self._own = self._traced = None

    def _end_interrupted_checks(self) -> None:
        """Removes the checked steps of other `FiniteCheck`s, of fits that were interrupted."""
        while True:
            other = getattr(innermost(self.model), "__self__", None)
            # All callbacks of one `fit` have the same `params`.
            if not isinstance(other, FiniteCheck) or other.params is self.params:
                return
            other._put_back()

    def _train(self, iterator: Any) -> Any:
        """Runs as many steps as Keras runs in one call of the training function."""
        begun, self._begun = self._begun, False
        if not begun:  # a `fit` without this callback, after an interrupted one
            own = self._own
            self._put_back()
            return own(iterator)
        if self._snapshot is not None:
            self._snapshot.begin_step()
        logs: Any = None
        spec = getattr(iterator, "element_spec", None)
        steps = _keras_training.steps_per_execution(self.model)
        if steps == 1 and not self._is_due():  # Keras's own step, at its own cost
            logs = self._own(iterator)
            self._step += 1
            return logs
        for i in range(steps):
            try:
                batch = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if i:
                    break
                raise
            try:
                logs = (self._checked if self._is_due() else self._unchecked)(batch, spec)
            except StopIteration as error:  # Keras would take it for the end of the data
                raise RuntimeError("the training step raised StopIteration") from error
            self._step += 1
            self._is_first = False
        return logs

    def _is_due(self) -> bool:
        """Returns True if the next step must be checked. The first step of a training must be."""
        return self._is_first or self._step % self.every_n_steps == 0

    def _unchecked(self, batch: Any, spec: Any) -> Any:
        if self._plain is None:
            self._plain = plain_step(self.model)
        return self._plain(batch, spec)

    def _checked(self, batch: Any, spec: Any) -> Any:
        assert self._check is not None
        if self._log is not None:
            self._log.before_step(batch, self._step + 1)
        if self._is_first and self.model.built and self._bad_weights(states=True):
            return self._not_made(batch)  # the report also has weights that steps do not check
        if self._diagnosis_of_model().has_bad_indices(batch):
            return self._not_made(batch)
        try:
            outcome = self._check(batch, spec)
        except tf.errors.InvalidArgumentError:
            self._fail_with_bad_data(batch)
            raise
        if self._is_first:
            self._warn_about_unused(self._check.unused)
        if not outcome.good:
            report = self._diagnose(batch)
            first = report.first
            if first is not None and not is_state(self.model, first.frame):
                return self._act(report)
            # The tensors are too large to check in one pass, or the diagnosis drew other numbers.
            outcome = self._make_exactly(batch, spec)
            if not outcome.good:
                if first is None:
                    report.note = self._drawn_differently(outcome)
                return self._act(report)
        self._policy.good_step()
        self.scaled_down += outcome.scaled_down
        self._past.append(
            {STEP: self._step + 1}
            | {
                frame.name: extent
                for frame, extent in self._extents(outcome)
                if frame.kind in ("weight gradient", "loss")
            }
        )
        if self._log is not None and outcome.largest:
            largest = np.max(np.asarray(outcome.largest, float), axis=0)
            self._log.step(self._step + 1, zip(outcome.frames, largest.tolist(), strict=True))
        self._logs = outcome.logs
        return outcome.logs

    def _drawn_differently(self, outcome: Outcome) -> str:
        """Returns the remark on a bad step whose repetition was finite."""
        wrong = [frame for frame, size in self._extents(outcome) if not np.isfinite(size)]
        first = wrong[0].subject.rstrip(":") if wrong else "a variable of the optimizer"
        return (
            f"{first} was not finite in the step. It was finite when the step was repeated on the "
            "same batch: the model draws random numbers without its variables."
        )

    def _ignores(self, frame: Frame) -> bool:
        if frame.kind == "weight":
            return not self._checks_weight(frame.name)
        return not self._patterns.choose(frame.name)

    def _bad_weights(self, *, states: bool) -> list[str]:
        return non_finite_paths(self.model, self._checks_weight, states=states)

    def _checks_weight(self, path: str) -> bool:
        if self._left_out is None:  # the weights are known after the first step
            self._left_out = self._patterns.left_out_weights(self.model)
        return path not in self._left_out

    def _checked_step(self, exact: bool = False) -> CheckedStep:
        logs = self._log is not None
        return CheckedStep(self.model, exact=exact, tells_largest=logs, ignores=self._ignores)

    def _fail_with_bad_data(self, batch: Any) -> None:
        """Raises a `NonFiniteError` if an operation has failed on a batch with NaN or infinity."""
        if _keras.has_workers(self.model.distribute_strategy):  # other workers may not have failed
            return
        if not self._diagnosis_of_model().data_are_finite(batch):
            assert self._reaction is not None
            self._reaction.fail(
                self._placed(self._diagnose(batch)),
                False,  # the weights were finite
                "An operation failed on these data, so the step cannot be skipped. Metrics and "
                "states of layers may have changed.",
            )

    def _diagnosis_of_model(self) -> Diagnosis:
        if self._diagnosis is None:
            self._diagnosis = Diagnosis(self.model, self.history, self._ignores)
        return self._diagnosis

    def _diagnose(self, batch: Any) -> Report:
        diagnosis = self._diagnosis_of_model()
        before = self._is_first if self.every_n_steps == 1 or self._is_first else None
        return self._first_of_workers(diagnosis(batch, self._step + 1, self._past, before))

    def _first_of_workers(self, report: Report) -> Report:
        """Returns one report for all workers, because all workers must react in the same way."""
        strategy = self.model.distribute_strategy
        if not _keras.has_workers(strategy):
            return report
        return worker_reports.earliest(
            report, lambda content: _keras.gather_bytes(strategy, content)
        )

    def _make_exactly(self, batch: Any, spec: Any) -> Outcome:
        if self._exact is None:
            self._exact = self._checked_step(exact=True)
        return self._exact(batch, spec)

    def _not_made(self, batch: Any) -> Any:
        """Reacts to a step that is known to be bad before it is made, and returns its logs."""
        _keras_training.build_compiled_metrics(self.model, batch)
        return self._act(self._diagnose(batch))

    @staticmethod
    def _extents(outcome: Outcome) -> list[tuple[Frame, float]]:
        """Returns the largest extent of each frame over the replicas."""
        largest = np.max(np.asarray(outcome.found, float), axis=0)
        return list(zip(outcome.frames, largest.tolist(), strict=True))

    def _warn_about_unused(self, unused: list[str]) -> None:
        if unused:
            warnings.warn(
                "FiniteCheck: no gradient reaches these weights. They are neither updated nor "
                f"decayed: {', '.join(unused)}",
                stacklevel=3,
            )

    def _placed(self, report: Report) -> Report:
        """Adds the epoch and the batch to a report, and the report to `reports`."""
        report.place = f"epoch {self._epoch_number}, batch {self._steps_of_epoch()[0] + 1}"
        self.reports.append(report)
        return report

    def _act(self, report: Report) -> Any:
        """Reacts to a bad step, and returns the step's logs."""
        assert self._reaction is not None
        self._placed(report)
        warning = self._reaction.react(self.reports, self._is_first)
        self.skipped += self._snapshot is None
        warnings.warn(warning, stacklevel=4)
        steps, bad = self._steps_of_epoch()  # the present bad step is in `bad` only
        return logs_after_bad_step(self.model, self._logs, steps >= bad)
