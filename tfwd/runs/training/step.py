"""Training step of a program: loss, gradient, clipping and update.

The results of a step stay on the device (`StepVariables`). The host fetches them when it prints or
logs. A step whose loss, gradient or learning rate is not finite changes nothing. All later steps
change nothing either. The host may therefore notice the failure late.

A program's step defines the loss of a batch (`forward`) and the learning rate (`rate`).
"""

from __future__ import annotations

import abc
import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import training as _keras_training
from tfwd.finite import all_finite
from tfwd.numerics import worker_reports
from tfwd.numerics.bad_step_report import Report
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.likely_causes import likely_causes
from tfwd.numerics.checked_step import tracked
from tfwd.numerics.checked_tensors import Frame
from tfwd.numerics.probes import Probes
from tfwd.numerics.step_watch import Watch
from tfwd.numerics.tensor_measurements import Measurement, measure_tensor
from tfwd.optimizers._updates.repeated_rows import summed
from tfwd.runs.interfaces import Failure
from tfwd.runs.training.gradient_accumulation import GatheredGradients
from tfwd.runs.training.optimizer import find_averaging
from tfwd.runs.training.step_variables import StepVariables
from tfwd.runs.workers.worker_group import Workers

NORMS = 8  # number of past gradient norms that a report compares


class Forward(NamedTuple):
    """Result of the forward pass on a batch.

    Attributes:
        nats: tensor of any shape. The losses of the items that `StepVariables` counts, such
            as tokens or texts.
        objective: function that converts the mean of `nats` to the value to differentiate.
        states: the new states of a recurrent model, as in `StepVariables.carried`; empty for other
            models.
    """

    nats: tf.Tensor
    objective: Callable[[tf.Tensor], tf.Tensor] = lambda loss: loss
    states: Sequence[Sequence[tf.Tensor]] = ()


class TrainStep(abc.ABC):
    """Base class of the programs' training steps.

        loss      = mean(nats)
        gradient  = clip by the global norm of d(objective)/d(weights), + l2 * weights

    With `steps_per_update=k`, an update takes the mean of the gradients and of the learning rates
    of k steps. Clipping and l2 act on the mean.

    Several workers divide the rows of the batch. The objective of each worker is weighted by the
    worker's share of the rows. The gradients are summed over the workers, once per update.

    Args:
        model: the model.
        optimizer: the optimizer. The constructor makes its slots. Each step sets its learning rate.
        state: the `StepVariables` that the step changes.
        signature: specs of the batch's tensors. The step is traced once. Unknown dimensions
            therefore cause no retracing.
        clip_norm: float. The maximum global norm; 0 disables clipping.
        l2: float. Factor of the coupled decay. The decay is added after clipping, as in PyTorch's
            optimizers. The reported norm does not include the decay.
        sparse: bool. True keeps the gradient of an embedding as `tf.IndexedSlices`, if the model
            uses the embedding only for lookups.
        checked: bool. Skips a step that is not finite.
        whole: bool. Also checks the inputs and outputs of each layer.
        steps_per_update: int. The number of steps before an update. A step that is skipped also
            drops the gradients since the last update.
        workers: the `Workers` that train together. A single process by default.

    Attributes:
        averaging: the optimizer's `NonMonotonicASGD`, or `None`.
        unused: list of str. Paths of the weights that no gradient reaches, known after tracing.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        state: StepVariables,
        signature: Sequence[tf.TensorSpec],
        *,
        clip_norm: float = 0.0,
        l2: float = 0.0,
        sparse: bool = False,
        checked: bool = True,
        whole: bool = False,
        steps_per_update: int = 1,
        workers: Workers | None = None,
    ):
        self.model, self.optimizer, self.state = model, optimizer, state
        self.workers = workers or Workers()
        self.clip_norm, self.l2, self.sparse = clip_norm, l2, sparse
        self.checked, self.whole = checked, whole
        self.averaging = find_averaging(optimizer)
        self.unused: list[str] = []
        # Slots that are made in the traced function could not be restored before the first step.
        _keras_training.build_optimizer(optimizer, model.trainable_variables)
        self._failed = tf.Variable(False, trainable=False)
        self._failure = tf.Variable([0.0, 0.0, 0.0], trainable=False)
        self._diagnosis: tuple[Probes, Callable[..., None]] | None = None
        self._norms = tf.Variable(tf.fill([NORMS], -1.0), trainable=False)  # the last norms
        trained = {id(_keras.variables.tf_variable(v)) for v in model.trainable_variables}
        self._draws = [v for v in tracked(model) if id(v) not in trained]
        self.function = tf.function(self._step, input_signature=list(signature))
        self._gathered: GatheredGradients | None = None
        if steps_per_update > 1:
            self._gathered = GatheredGradients(model.trainable_variables)
            self._gather = tf.function(
                lambda *batch: self._step(*batch, updates=False), input_signature=list(signature)
            )

    @abc.abstractmethod
    def forward(self, *batch: tf.Tensor) -> Forward:
        """Runs the model on a batch in training mode, within a tape."""

    def rate(self, *batch: tf.Tensor) -> tf.Tensor:
        """Returns the learning rate of this step."""
        return self.state.learning_rate.read_value()

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Makes the update. The optimizer already has the step's learning rate."""
        _keras_training.make_step(self.optimizer, gradients, variables)

    def __call__(self, *batch: tf.Tensor, update: bool = True) -> None:
        (self.function if update else self._gather)(*batch)

    def trace(self) -> None:
        """Traces the step. Without this call, the first step traces."""
        self.function.get_concrete_function()

    def failure(self) -> Failure | None:
        """Returns the first step that was not finite, or `None`. Waits for the device."""
        if not self._failed.numpy():
            return None
        loss, norm, rate = (float(value) for value in self._failure.numpy())
        return Failure(int(self.state.step.numpy()) + 1, loss, norm, rate)

    def diagnose(self, *batch: tf.Tensor) -> Report:
        """Examines the failed step on its batch. Changes no state of the run."""
        if self._diagnosis is None:
            probes = Probes(self.model)

            def again(*batch: tf.Tensor) -> None:
                with probes:
                    self._step(*batch, whole=False, updates=self._gathered is None)

            signature = self.function.input_signature
            self._diagnosis = probes, tf.function(again, input_signature=signature)
        probes, function = self._diagnosis
        function(*batch)
        norms = [float(norm) for norm in self._norms.numpy() if norm >= 0]
        report = probes.report([{"the gradient of all weights": norm} for norm in norms])
        if self.workers.count > 1:
            report = worker_reports.earliest(report, self.workers.gather)
        rate = Measurement(
            Frame("learning rate", "learning rate"), measure_tensor(self._failure[2]).numbers()
        )
        if report.first is None and not rate.is_finite:
            causes = likely_causes(Evidence([rate], {}, [], [], self.model, "", None))
            return Report(report.step, [*report.found, rate], causes)
        return report

    def resume_after_failure(self) -> None:
        """Enables the next steps. The failed step counts as made."""
        self._failed.assign(False)
        self.state.step.assign_add(1)
        if self._gathered is not None:
            self._gathered.forget()

    def _step(self, *batch: tf.Tensor, whole: bool | None = None, updates: bool = True) -> None:
        state = self.state
        looked_at: list[Any] = []
        watched: Any = contextlib.nullcontext()
        if self.whole if whole is None else whole:
            watch = Watch(self.model, lambda _, x, __: looked_at.append(x), closely=False)
            watched = watch.open()
        draws = [variable.read_value() for variable in self._draws]
        scales_loss = _keras_training.scales_loss(self.optimizer)
        variables = self.model.trainable_variables
        with self.workers.share(batch) as (own, share):
            with watched, tf.GradientTape() as tape:
                output = self.forward(*own)
                loss = tf.reduce_mean(output.nats)
                objective = output.objective(loss)
                if share is not None:
                    objective *= tf.cast(share, objective.dtype)
                if scales_loss:
                    objective = _keras_training.scale_loss(self.optimizer, objective)
            weights = [_keras.variables.tf_variable(v) for v in variables]
            gradients = tape.gradient(objective, weights)
        self.unused = [
            _keras.variables.path(v) for v, g in zip(variables, gradients, strict=True) if g is None
        ]
        # A sparse gradient repeats a row for each use. Without summing the repeated rows, its norm
        # would be wrong.
        once = summed if self.sparse and not self.l2 else tf.convert_to_tensor
        gradients = [None if g is None else once(g) for g in gradients]
        total = tf.reduce_sum(tf.cast(output.nats, tf.float64))
        counted = tf.cast(tf.size(output.nats), tf.float64)
        all_are_finite = all_finite(looked_at)
        if not updates and not scales_loss:
            all_are_finite &= tf.math.is_finite(tf.linalg.global_norm(gradients))
        rate = self.rate(*batch)
        if updates and self._gathered is not None:
            gradients, rate = self._gathered.means(gradients, rate)
        if share is not None:
            numbers = [total, counted, tf.cast(~all_are_finite, tf.float64)]
            sent = gradients if updates else []
            (total, counted, bad), sums = self._sum_over_workers(share, numbers, sent)
            if updates:
                gradients = [None if g is None else once(g) for g in sums]
            loss, all_are_finite = total / counted, bad == 0
        unit = tf.constant(1.0)
        if scales_loss:
            unit = tf.cast(_keras_training.loss_scale(self.optimizer), tf.float32)
        norm = tf.linalg.global_norm(gradients)
        if updates:
            gradients = self.final_gradients(gradients, norm, unit if scales_loss else None)
        loss, norm = tf.cast(loss, tf.float32), tf.cast(norm, tf.float32)
        finite = tf.math.is_finite(loss)
        if scales_loss:
            norm = norm / unit  # the scaler handles a norm that is not finite
        elif updates:
            finite = finite & tf.math.is_finite(norm)
        finite = finite & all_are_finite
        finite = finite & tf.math.is_finite(rate)

        def update() -> tf.Tensor:
            if updates:
                _keras_training.set_learning_rate(self.optimizer, rate)
                with warnings.catch_warnings():  # for unused weights: see `unused`
                    warnings.filterwarnings("ignore", ".*[Gg]radient.*variables")
                    self.apply(gradients, variables)
                if self._gathered is not None:
                    self._gathered.forget()
                state.gradient_norm.assign(norm)
                self._norms.assign(tf.concat([self._norms[1:], [norm]], 0))
            elif self._gathered is not None:
                self._gathered.add(gradients, rate)
            for old, new in zip(state.carried, output.states, strict=True):
                for variable, value in zip(old, new, strict=True):
                    self.workers.assign_rows(variable, value)
            state.step.assign_add(1)
            for nats_sum, count in (
                (state.epoch_nats, state.epoch_tokens),
                (state.log_nats, state.log_tokens),
            ):
                nats_sum.assign_add(total)
                count.assign_add(counted)
            return tf.constant(True)

        def keep() -> tf.Tensor:
            seen = tf.stack([loss, norm, rate])
            self._failure.assign(tf.where(self._failed, self._failure, seen))
            self._failed.assign(True)
            for variable, value in zip(self._draws, draws, strict=True):
                variable.assign(value)
            return tf.constant(False)

        if self.checked:
            tf.cond(finite & ~self._failed, update, keep)
        else:
            update()

    def _sum_over_workers(
        self, share: tf.Tensor, numbers: list[tf.Tensor], gradients: list[Any]
    ) -> tuple[list[tf.Tensor], list[Any]]:
        """Returns the sums over the workers of `numbers` (total, count, bad) and of `gradients`."""
        total, counted, bad = numbers
        rows = tf.cast(share > 0, tf.float64)  # a worker without rows computes another worker's row
        sent = tf.concat([[total * rows, counted * rows, bad], self.workers.vote], 0)
        *sums, received = self.workers.sum([*gradients, sent])
        self.workers.votes.assign(received[3:])
        return tf.unstack(received[:3]), sums

    def final_gradients(
        self, gradients: list[Any], norm: tf.Tensor, scale: tf.Tensor | None
    ) -> list[Any]:
        """Returns the gradients of an update: clipped by their global norm, with the coupled decay.

        Args:
            gradients: the gradients.
            norm: the global norm of the gradients.
            scale: the factor of the loss and of the gradients; `None` for 1.
        """
        if self.clip_norm:
            limit = self.clip_norm if scale is None else self.clip_norm * scale
            gradients, _ = tf.clip_by_global_norm(gradients, limit, use_norm=norm)
        if not self.l2:
            return gradients
        l2 = tf.constant(self.l2) if scale is None else self.l2 * scale
        return [
            None if g is None else g + tf.cast(l2, g.dtype) * _keras.variables.value(v)
            for g, v in zip(gradients, self.model.trainable_variables, strict=True)
        ]
