"""One training step: loss, gradient, clipping, update.

What a step produces stays on the device (`state.RunState`); the host fetches it when it has
something to print. A step whose loss, gradient or learning rate is not finite changes nothing, nor
does any after it, so that the host may notice late and still find all as it was.

A program's step says how a batch becomes a loss (`forward`) and at which rate it is learnt from
(`rate`).
"""

from __future__ import annotations

import abc
import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import ml_collections
import tensorflow as tf

from tfwd import _keras
from tfwd.finite import all_finite
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.search import likely
from tfwd.numerics.checked_step import tracked
from tfwd.numerics.details import look
from tfwd.numerics.frames import Frame
from tfwd.numerics.probes import Probes
from tfwd.numerics.report import Found, Report
from tfwd.numerics.watch import Watch
from tfwd.optimizers._updates import steps
from tfwd.optimizers._updates.repeated_rows import summed
from tfwd.runs.errors import UserError
from tfwd.runs.interfaces import Failure
from tfwd.runs.storage.state import RunState
from tfwd.runs.training.optimizer import averaging, decaying, make_optimizer

NORMS = 8  # of the gradient, of so many steps, a report can tell whether it grew


class Forward(NamedTuple):
    """What a batch became.

    Attributes:
        nats: the loss of each of the things that `RunState` counts, of any shape.
        objective: what the gradient is taken of, from the mean of `nats`.
        states: of a recurrent model, as in `RunState.carried`; of others none.
    """

    nats: tf.Tensor
    objective: Callable[[tf.Tensor], tf.Tensor] = lambda loss: loss
    states: Sequence[Sequence[tf.Tensor]] = ()


class TrainStep(abc.ABC):
    """The training step.

        loss      = mean(nats)
        gradient  = clip by the global norm of d(objective)/d(weights), + l2 * weights

    Args:
        model: the model.
        optimizer: its slots are made here. Its learning rate is assigned at each step.
        state: what the step changes.
        signature: of the batch's tensors. The step is traced once: what is left open in it never
            traces anew.
        clip_norm: the largest global norm; 0 does not clip.
        l2: coupled decay. It is added after clipping, as PyTorch's optimizers add theirs, and is
            no part of the norm that is reported.
        sparse: leaves the gradient of a table that is only looked up in as its rows.
        checked: makes no step that is not finite.
        whole: looks at what each layer takes and gives, too.

    Attributes:
        averaging: the optimizer's `NonMonotonicASGD`, or `None`.
        unused: the paths of the weights that no gradient reaches; known once it is traced.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        state: RunState,
        signature: Sequence[tf.TensorSpec],
        *,
        clip_norm: float = 0.0,
        l2: float = 0.0,
        sparse: bool = False,
        checked: bool = True,
        whole: bool = False,
    ):
        self.model, self.optimizer, self.state = model, optimizer, state
        self.clip_norm, self.l2, self.sparse = clip_norm, l2, sparse
        self.checked, self.whole = checked, whole
        self.averaging = averaging(optimizer)
        self.unused: list[str] = []
        # Slots made inside the traced function could not be restored before the first step.
        steps.build(optimizer, model.trainable_variables)
        self._failed = tf.Variable(False, trainable=False)
        self._failure = tf.Variable([0.0, 0.0, 0.0], trainable=False)
        self._diagnosis: tuple[Probes, Callable[..., None]] | None = None
        self._norms = tf.Variable(tf.fill([NORMS], -1.0), trainable=False)  # the last ones
        trained = {id(_keras.variables.tf_variable(v)) for v in model.trainable_variables}
        self._draws = [v for v in tracked(model) if id(v) not in trained]
        self.function = tf.function(self._step, input_signature=list(signature))

    @abc.abstractmethod
    def forward(self, *batch: tf.Tensor) -> Forward:
        """Runs the model on a batch, as it trains; called within a tape."""

    def rate(self, *batch: tf.Tensor) -> tf.Tensor:
        """The learning rate of this step."""
        return self.state.learning_rate.read_value()

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Makes the update; the optimizer has the step's learning rate."""
        steps.apply(self.optimizer, gradients, variables)

    def __call__(self, *batch: tf.Tensor) -> None:
        self.function(*batch)

    def trace(self) -> None:
        """Traces the step, which the first call does otherwise."""
        self.function.get_concrete_function()

    def failure(self) -> Failure | None:
        """The first step that was not finite, if there was one. Waits for the device."""
        if not self._failed.numpy():
            return None
        loss, norm, rate = (float(value) for value in self._failure.numpy())
        return Failure(int(self.state.step.numpy()) + 1, loss, norm, rate)

    def diagnose(self, *batch: tf.Tensor) -> Report:
        """Looks closely at the step that failed, on its batch, and changes nothing."""
        if self._diagnosis is None:
            probes = Probes(self.model)

            def again(*batch: tf.Tensor) -> None:
                with probes:
                    self._step(*batch, whole=False)

            signature = self.function.input_signature
            self._diagnosis = probes, tf.function(again, input_signature=signature)
        probes, function = self._diagnosis
        function(*batch)
        norms = [float(norm) for norm in self._norms.numpy() if norm >= 0]
        report = probes.report([{"the gradient of all weights": norm} for norm in norms])
        rate = Found(Frame("learning rate", "learning rate"), look(self._failure[2]).numbers())
        if report.first is None and not rate.is_finite:
            causes = likely(Evidence([rate], {}, [], [], self.model, "", None))
            return Report(report.step, [*report.found, rate], causes)
        return report

    def go_on(self) -> None:
        """Makes steps again, as if that one had been made."""
        self._failed.assign(False)
        self.state.step.assign_add(1)

    def _step(self, *batch: tf.Tensor, whole: bool | None = None) -> None:
        state = self.state
        looked_at: list[Any] = []
        watched: Any = contextlib.nullcontext()
        if self.whole if whole is None else whole:
            watch = Watch(self.model, lambda _, x, __: looked_at.append(x), closely=False)
            watched = watch.open()
        draws = [variable.read_value() for variable in self._draws]
        scales_loss = steps.scales_loss(self.optimizer)
        with watched, tf.GradientTape() as tape:
            output = self.forward(*batch)
            loss = tf.reduce_mean(output.nats)
            objective = output.objective(loss)
            if scales_loss:
                objective = steps.scale_loss(self.optimizer, objective)
        variables = self.model.trainable_variables
        gradients = tape.gradient(objective, [_keras.variables.tf_variable(v) for v in variables])
        self.unused = [
            _keras.variables.path(v) for v, g in zip(variables, gradients, strict=True) if g is None
        ]
        # A sparse gradient names a row once for each time it was used, and the norm of that is not
        # the norm of the gradient.
        once = summed if self.sparse and not self.l2 else tf.convert_to_tensor
        gradients = [None if g is None else once(g) for g in gradients]
        unit = tf.constant(1.0)
        if scales_loss:
            unit = tf.cast(steps.loss_scale(self.optimizer), tf.float32)
        norm = tf.linalg.global_norm(gradients)
        if self.clip_norm:
            limit = self.clip_norm * unit if scales_loss else self.clip_norm
            gradients, _ = tf.clip_by_global_norm(gradients, limit, use_norm=norm)
        if self.l2:
            gradients = [
                None
                if g is None
                else g + tf.cast(self.l2 * unit, g.dtype) * _keras.variables.value(v)
                for g, v in zip(gradients, variables, strict=True)
            ]
        loss, norm = tf.cast(loss, tf.float32), tf.cast(norm, tf.float32)
        finite = tf.math.is_finite(loss)
        if scales_loss:
            norm = norm / unit  # a norm that is not finite is the scaler's own business
        else:
            finite = finite & tf.math.is_finite(norm)
        finite = finite & all_finite(looked_at)
        rate = self.rate(*batch)
        finite = finite & tf.math.is_finite(rate)
        total = tf.reduce_sum(tf.cast(output.nats, tf.float64))
        counted = tf.cast(tf.size(output.nats), tf.float64)

        def update() -> tf.Tensor:
            steps.set_learning_rate(self.optimizer, rate)
            with warnings.catch_warnings():  # of weights that are not used: see `unused`
                warnings.filterwarnings("ignore", ".*[Gg]radient.*variables")
                self.apply(gradients, variables)
            for old, new in zip(state.carried, output.states, strict=True):
                for variable, value in zip(old, new, strict=True):
                    variable.assign(value)
            state.step.assign_add(1)
            state.gradient_norm.assign(norm)
            self._norms.assign(tf.concat([self._norms[1:], [norm]], 0))
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


def optimizer_and_options(
    config: ml_collections.ConfigDict, model: keras.Model, own: Sequence[str] = ()
) -> tuple[keras.optimizers.Optimizer, dict[str, Any]]:
    """The optimizer that a configuration describes, and the arguments of `TrainStep` beside it.

    Args:
        config: the whole configuration.
        model: whose weights the patterns of the decay are held against.
        own: the names under `optimizer.` that are of the program's step, and not looked at here.

    Raises:
        UserError: the optimizer does not take its arguments, or a pattern matches no weight.
    """
    optimizer = {k: v for k, v in config.optimizer.to_dict().items() if k not in own}
    rate, clip_norm, l2 = (optimizer.pop(key) for key in ("learning_rate", "clip_norm", "l2"))
    made = make_optimizer(
        optimizer.pop("name"), rate, dtype_policy=config.model.dtype_policy, **optimizer
    )
    try:
        decay = decaying(made)
        if decay is not None:
            decay.decay_table(model)
    except ValueError as error:
        raise UserError(f"optimizer.decay_{error}".replace("DecoupledWeightDecay: ", "")) from error
    options = {
        "clip_norm": clip_norm,
        "l2": l2,
        "sparse": optimizer["decay_sparse"] == "rows",
        "checked": config.numerics.check != "off",
        "whole": config.numerics.whole,
    }
    return made, options
