"""`FiniteCheck`: in `fit`, stops, skips or goes back where a step is not finite."""

from __future__ import annotations

import math
import os
import warnings
from collections import deque
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import training as _keras_training
from tfwd.callbacks.last_epoch import LastEpoch
from tfwd.callbacks.left_out import why_in_vain
from tfwd.callbacks.training_function import replace_innermost
from tfwd.finite import all_finite
from tfwd.numerics.checked_step import CheckedStep, Outcome, not_finite, plain_step
from tfwd.numerics.diagnosis import Diagnosis
from tfwd.numerics.frames import Frame
from tfwd.numerics.log import Log, check_plot
from tfwd.numerics.patterns import Patterns
from tfwd.numerics.report import NonFiniteError, Report

ACTIONS = ("raise", "skip", "restore")


class FiniteCheck(keras.callbacks.Callback):
    """In `fit`, finds the first tensor that is not finite, before it reaches the weights.

    Each step is made only if everything in it is finite: the batch, what goes into layers and comes
    out of them, the loss, the gradients and the learning rate. Else weights, the optimizer's slots,
    statistics of BatchNormalization, states of generators and metrics are those before the step,
    bit for bit; the batch is looked at once more, tensor by tensor, and a report says which layer
    was first, forward or backward, how many elements, and the likely cause.

    It works in eager mode, in graphs, with `jit_compile=True` and under MirroredStrategy, where a
    replica's bad step is one of all. With `steps_per_execution=k` the k steps are made one after
    the other and each is looked at. A step of a `LossScaleOptimizer` that only lowers the scale is
    no error, and is counted in `scaled_down`. Saved models do not know of the callback.

    Training without a bad step is that without the callback: to the bit in eager mode, and in most
    models in graphs. Exceptions are SGD with momentum, noise that a layer of one's own adds, and a
    model whose bare step TensorFlow's graph optimizer rewrites where this looks (MobileNetV2); and
    under XLA about half of Keras's optimizers. There the compiler groups products and sums in
    another way, which changes last bits. Layers that draw by TensorFlow's stateful operations, as
    Dropout on Keras 2 or `tf.random.normal`, draw anew after a step that was left out, and in eager
    mode after one that was logged.

    Args:
        action: what is done about a bad step: "raise" raises `tfwd.numerics.NonFiniteError`; "skip"
            goes on with the next batch; "restore" goes back to the weights, the optimizer's state
            and the rest of the variables as the last epoch left them, with the learning rate
            multiplied by `factor`, and goes on with the next batch. Metrics stay: those of an epoch
            are over its good steps. In the first epoch there is nothing to go back to, and a bad
            step raises.
        every: how many steps from one check to the next. Steps in between are Keras's own, at
            Keras's own cost. Nothing keeps what is not finite in them from the weights.
        history: of how many steps before, and of how many tensors, a report tells.
        log_dir: a folder for TensorBoard, or None. Reports go to its text tab, the plot to its
            images; and every `log_every` steps the absolute mean of each output, weight and
            gradient, how many percent of it are 0, and the ratio of update to weight go to its
            scalars, and histograms. For these the batch is run once more.
        plot: a file (`.png`, `.svg`, ..), or None: tensors by steps, coloured by log10 of the
            largest absolute value, at the end of training and after each bad step. It
            costs each step a further pass over each tensor, as `log_dir` does.
        max_consecutive: so many bad steps in a row are skipped, or gone back from; the next raises.
        factor: see "restore".
        log_every: see `log_dir`.
        exclude: a regular expression of layers that may give or take what is not finite, as one
            that makes a mask of -infinity: matched against the layer's path, or a whole end of it;
            `x` and `y` stand for the batch.

    Attributes:
        reports: the `Report` of each bad step.
        skipped: how many steps were left out.
        scaled_down: how many steps did no more than lower the scale of the loss.

    Raises:
        ValueError: an argument is wrong; before training, if a file or folder cannot be written,
            if the learning rate of "restore" is a schedule, which cannot be multiplied, or under
            ParameterServerStrategy, whose workers make their steps by themselves.
        tfwd.numerics.NonFiniteError: in `fit`; see `action`.

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
        every: int = 1,
        history: int = 20,
        log_dir: str | os.PathLike[str] | None = None,
        plot: str | os.PathLike[str] | None = None,
        max_consecutive: int = 5,
        factor: float = 0.5,
        log_every: int = 100,
        exclude: str | None = None,
    ) -> None:
        super().__init__()
        if action not in ACTIONS:
            raise ValueError(f"action={action!r}: give one of {', '.join(map(repr, ACTIONS))}")
        for name, value, least in (
            ("every", every, 1),
            ("history", history, 0),
            ("max_consecutive", max_consecutive, 0),
            ("log_every", log_every, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r}: give a whole number of at least {least}")
        if not isinstance(factor, (int, float)) or not 0.0 < factor <= 1.0:
            raise ValueError(f"factor={factor!r}: give a number above 0, and at most 1")
        for name, path in (("log_dir", log_dir), ("plot", plot)):
            if path is not None and (not isinstance(path, (str, os.PathLike)) or not str(path)):
                raise ValueError(f"{name}={path!r}: give a path")
        if plot is not None:
            check_plot(plot)
        self._patterns = Patterns("FiniteCheck", exclude=exclude)
        self.action, self.every, self.history = action, every, history
        self.max_consecutive, self.factor = max_consecutive, factor
        self.log_dir, self.plot, self.log_every = log_dir, plot, log_every
        self.exclude = exclude
        self.reports: list[Report] = []
        self.skipped = self.scaled_down = 0
        self._step = self._consecutive = 0
        self._epoch = 0, 0  # the steps before it, and those of them that were left out
        self._epoch_number = 1
        self._is_first, self._begun = True, False
        self._past: deque[dict[str, float]] = deque(maxlen=max(history, 1))
        self._fitted: Any = None
        self._check: CheckedStep | None = None
        self._exact: CheckedStep | None = None
        self._diagnosis: Diagnosis | None = None
        self._plain: Any = None
        self._log: Log | None = None
        self._own: Any = None
        self._check_of: Any = None  # the training function that `_check` is for
        self._logs: Any = None
        self._goes_back: LastEpoch | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Puts the checked step in the place of the model's."""
        self._put_back()  # a training that was interrupted has not
        model = self.model
        if model.built:
            self._patterns.check(model, "x", "y", "sample_weight")
        if isinstance(
            model.distribute_strategy, tf.distribute.experimental.ParameterServerStrategy
        ):
            raise ValueError(
                "FiniteCheck does not work under ParameterServerStrategy, whose workers make their "
                "steps by themselves: use tfwd.optimizers.ApplyIfFinite"
            )
        if self._fitted is not model:
            self.reports, self.skipped, self.scaled_down = [], 0, 0
            self._step, self._fitted = 0, model
        self._past.clear()
        self._consecutive, self._is_first = 0, True
        self._goes_back = LastEpoch(model, self.factor) if self.action == "restore" else None
        if self.log_dir is not None or self.plot is not None:
            self._log = Log(model, self.log_dir, self.plot, self.log_every)
        self._own = replace_innermost(model, self._train)
        if self._check is None or self._check_of is not self._own:  # new, or compiled anew
            self._check = self._checked_step()
            self._exact = self._plain = self._diagnosis = None
            self._check_of = self._own

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Says that the next call of the training function is of a fit with this callback."""
        self._begun = True

    def on_train_end(self, logs: Any = None) -> None:
        """Gives the model its own step back."""
        self._put_back()
        self._goes_back = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes where the epoch begins."""
        self._epoch = self._step, self.skipped
        self._epoch_number = epoch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keeps what the epoch has left, for "restore".

        An epoch whose steps are all left out has no loss: Keras's would be 0, the best there is.
        """
        if self._goes_back is not None:
            self._goes_back.keep()
        steps, skipped = self._step - self._epoch[0], self.skipped - self._epoch[1]
        if logs and skipped and skipped == steps:
            logs.update({key: math.nan for key in logs if not key.startswith("val_")})
            warnings.warn(
                f"FiniteCheck: no step of epoch {epoch + 1} was made. As the {steps} left out "
                "changed no weight, the same batches will be left out again",
                stacklevel=2,
            )

    def _put_back(self) -> None:
        if self._own is not None:
            replace_innermost(self.model, self._own)
        if self._log is not None:
            self._log.close(self._step)
        self._log = self._own = None

    def _train(self, iterator: Any) -> Any:
        """The model's training function: so many steps as Keras would make in a call."""
        begun, self._begun = self._begun, False
        if not begun:  # another training, after one that was interrupted
            own = self._own
            self._put_back()
            return own(iterator)
        logs: Any = None
        spec = getattr(iterator, "element_spec", None)
        steps = _keras_training.steps_per_execution(self.model)
        if steps == 1 and self._step % self.every:  # Keras's own step, at its own cost
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
            if self._step % self.every:
                logs = self._unchecked(batch, spec)
            else:
                logs = self._checked(batch, spec)
            self._step += 1
            self._is_first = False
        return logs

    def _unchecked(self, batch: Any, spec: Any) -> Any:
        if self._plain is None:
            self._plain = plain_step(self.model)
        return self._plain(batch, spec)

    def _checked(self, batch: Any, spec: Any) -> Any:
        assert self._check is not None
        if self._log is not None:
            self._log.before_step(batch, self._step + 1)
        if self._is_first and self.model.built and not self._has_finite_weights():
            return self._act(self._diagnose(batch))  # those that no step looks at included
        outcome = self._check(batch, spec)
        if self._is_first:
            self._tell_of_unused(self._check.unused)
        if not outcome.good:
            report = self._diagnose(batch)
            if report.first is not None:
                return self._act(report)
            # Finite, but too large to be sure in one pass; or drawn anew.
            outcome = self._make_exactly(batch, spec)
            if not outcome.good:
                wrong = [frame for frame, one in self._extents(outcome) if not np.isfinite(one)]
                first = wrong[0].subject.rstrip(":") if wrong else "a variable of the optimizer"
                report.note = (
                    f"In the step itself it was this that is not finite: {first}. A second look at "
                    "the same batch did not show it: the model draws at random past its variables."
                )
                return self._act(report)
        self._consecutive = 0
        self.scaled_down += outcome.scaled_down
        self._past.append(
            {
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

    def _ignores(self, frame: Frame) -> bool:
        return not self._patterns.choose(frame.name)

    def _checked_step(self, exact: bool = False) -> CheckedStep:
        logs = self._log is not None
        return CheckedStep(self.model, exact=exact, tells_largest=logs, ignores=self._ignores)

    def _has_finite_weights(self) -> bool:
        return bool(all_finite([_keras.variables.value(v) for v in self.model.weights]))

    def _diagnose(self, batch: Any) -> Report:
        if self._diagnosis is None:
            self._diagnosis = Diagnosis(self.model, self.history, self._ignores)
        before = self._is_first if self.every == 1 or self._is_first else None
        return self._diagnosis(batch, self._step + 1, self._past, before)

    def _make_exactly(self, batch: Any, spec: Any) -> Outcome:
        if self._exact is None:
            self._exact = self._checked_step(exact=True)
        return self._exact(batch, spec)

    @staticmethod
    def _extents(outcome: Outcome) -> list[tuple[Frame, float]]:
        """The largest extent over the replicas of each frame."""
        largest = np.max(np.asarray(outcome.found, float), axis=0)
        return list(zip(outcome.frames, largest.tolist(), strict=True))

    def _tell_of_unused(self, unused: list[str]) -> None:
        if unused:
            warnings.warn(
                "FiniteCheck: no gradient reaches these weights, which are neither updated nor "
                f"decayed: {', '.join(unused)}",
                stacklevel=3,
            )

    def _act(self, report: Report) -> Any:
        report.place = f"epoch {self._epoch_number}, batch {self._step - self._epoch[0] + 1}"
        self.reports.append(report)
        self._consecutive += 1
        if self._log is not None:
            self._log.report(report)
        if self.action == "raise":
            self._fail(report)
        back = self._goes_back
        in_vain = self._consecutive - 1 if back is None else back.returns
        if in_vain >= self.max_consecutive:
            tried = "left out" if back is None else "gone back from"
            note = f"{in_vain} bad steps in a row were {tried} before it." if in_vain else ""
            self._fail(
                report, f"{note} {why_in_vain(self.reports, in_vain)}" if back is None else note
            )
        if back is None and report.first is not None and report.first.frame.kind == "weight":
            self._fail(report, "Skipping a step does not help here: it changes no weight.")
        if back is None:
            self.skipped += 1
            what = "a step is left out"
        elif not back.is_kept:
            self._fail(report, "There is no finished epoch yet to go back to.")
        else:
            what = f"back to the end of the last epoch, with the learning rate {back.restore()}"
        why = "; ".join(cause.name for cause in report.causes)
        why = f" ({why}). {report.causes[0].evidence}" if why else ""
        warnings.warn(f"FiniteCheck: {what}: {report.sentence}{why}", stacklevel=4)
        return self._logs if self._logs is not None else self.model.get_metrics_result()

    def _fail(self, report: Report, note: str = "") -> NoReturn:
        report.note = f"{report.note} {note} {self._weights_now()}".strip().replace("  ", " ")
        self._put_back()
        raise NonFiniteError(report)

    def _weights_now(self) -> str:
        """What a failed training leaves in the model, in words."""
        lost = not_finite(self.model)
        if not lost:
            return "The weights are those before the step."
        names = ", ".join(f"'{path}'" for path in lost[:3])
        more = f" and {len(lost) - 3} others" if len(lost) > 3 else ""
        if self._is_first:
            return f"Not finite before this training: {names}{more}. Load an earlier checkpoint."
        again = " Check each step (every=1) from there on." if self.every > 1 else ""
        return (
            f"The weights before the step are lost: {names}{more} {'are' if lost[1:] else 'is'} "
            f"not finite. Load an earlier checkpoint.{again}"
        )
