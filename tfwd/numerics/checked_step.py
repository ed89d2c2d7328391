"""A model's own training step, watched, and made only if everything in it is finite.

The step is the model's `train_step`, as `fit` calls it. What is looked at is handed to the host as
values, since XLA leaves out whatever would stop the program. The variables keep their values unless

    good = all(finite(data, forward, loss, backward, learning rate)) on all replicas,

by `tfwd.tentative`. Of optimizers that cannot turn finite gradients of moderate size into anything
else, that is known before the first assignment. Of others, and where the training step is the
user's, the new values are looked at too, and taken back if they are not finite.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _graphs, _keras
from tfwd._keras import steps as _keras_steps
from tfwd._keras import training as _keras_training
from tfwd._keras import updates as _keras_updates
from tfwd._keras import wrapped_optimizers
from tfwd.finite import all_finite, extent
from tfwd.numerics.frames import BACKWARD, FORWARD, Frame, named
from tfwd.numerics.watch import Watch
from tfwd.tentative import Tentative

# Optimizers whose update of finite numbers of moderate size is finite.
SAFE = ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "Adagrad", "Adadelta", "RMSprop", "Lion")
SMALLEST_EPSILON = 1e-12
MODERATE = 1e15  # whose square is a float32 by far


class Outcome(NamedTuple):
    """What came of a step.

    Attributes:
        logs: what the model's `train_step` returned.
        good: whether the step was made.
        frames: what was looked at, in the order of computation.
        found: for each replica, what was found in each frame.
        scale: the scale of the loss that the optimizer had, 1 without one.
        scaled_down: whether only scaled gradients were not finite, so that the scale is lowered.
    """

    logs: Any
    good: bool
    frames: list[Frame]
    found: list[list[Any]]
    scale: float
    scaled_down: bool


class CheckedStep:
    """The training step of a compiled model, on a batch that the host has.

    Args:
        model: compiled, as `fit` has it.
        measure: what is found in a tensor, a nest of tensors, from a frame, the tensor and
            `Watch`'s third; by default its `extent`. With one, the step is only looked at: all
            variables stay as they are.
        chosen: whether the layer or weight of a path is looked at.
        weights: whether the model's weights are looked at before the step.
        exact: looks at each element, also where one pass over a tensor cannot tell.

    Attributes:
        unused: the paths of the weights that no gradient reached, known after a step.
    """

    def __init__(
        self,
        model: keras.Model,
        measure: Callable[[Frame, Any, Any], Any] | None = None,
        chosen: Callable[[str], bool] = lambda path: True,
        weights: bool = False,
        exact: bool = False,
    ):
        self.model, self.chosen, self.weights, self.exact = model, chosen, weights, exact
        self.dry = measure is not None
        self.unused: list[str] = []
        if exact:
            measure = _flag
        self.measure = measure or (lambda frame, tensor, sequence: extent(tensor))
        self.strategy = model.distribute_strategy
        self.train_step = _keras_training.train_step(model)
        self.is_keras_own = _keras_training.is_own_step(model)
        self._traces: list[_Trace] = []
        self._function = _compiled(model, self._on_batch)

    def __call__(self, data: Any) -> Outcome:
        """Makes the step on a batch, as the dataset of `fit` gives it."""
        logs, number, values, before = self._function(data)
        trace = self._traces[int(number)]
        # A list for each replica, of what `_Run` returned.
        local = self.strategy.experimental_local_results
        replicas = [list(one) for one in zip(*map(local, values), strict=True)]
        good, scale, scaled_down = replicas[0][:3]
        if not good:
            for variable, value in zip(trace.variables, before, strict=True):
                variable.assign(value)
        return Outcome(
            _keras_training.reduced(self.model, logs),
            bool(good),
            trace.frames,
            [trace.unpacked(one[3:]) for one in replicas],
            float(scale),
            bool(scaled_down),
        )

    def _on_batch(self, data: Any) -> Any:
        optimizers = _keras_training.optimizers(self.model)
        careful = self.exact or not self.is_keras_own or not all(map(_is_safe, optimizers))
        careful |= _graphs.in_xla() and not _keras_updates.MAY_BE_GATED_UNDER_XLA
        known = tracked(self.model)
        if not careful:  # what an optimizer updates is not assigned to before it is decided
            updated = [*self.model.trainable_variables, *(v for o in optimizers for v in _state(o))]
            ids = {id(_keras.variables.tf_variable(variable)) for variable in updated}
            known = [variable for variable in known if id(variable) not in ids]
        run = _Run(self, careful)
        with (
            Tentative(known) as run.tentative,
            _keras_updates.entered(optimizers, _around_update),
            _keras_training.computed_loss(self.model, _look_at_loss),
        ):
            logs, values = self.strategy.run(run, args=(data,))
        before = run.tentative.before
        if self.model.run_eagerly:
            self._traces.clear()  # only the last is asked for
        self._traces.append(_Trace(run.frames, run.structure, [v for v, _ in before]))
        return logs, tf.constant(len(self._traces) - 1), values, [value for _, value in before]


def plain_step(model: keras.Model) -> Callable[[Any], Any]:
    """The training step of a compiled model, on a batch that the host has, and nothing else."""
    step = _keras_training.train_step(model)
    function = _compiled(model, lambda data: model.distribute_strategy.run(step, args=(data,)))
    return lambda data: _keras_training.reduced(model, function(data))


def _compiled(model: keras.Model, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if model.run_eagerly:
        return function
    return tf.function(
        function, reduce_retracing=True, jit_compile=bool(model.jit_compile), autograph=False
    )


def _flag(frame: Frame, tensor: Any, sequence: Any) -> tf.Tensor:
    return tf.where(all_finite([tensor]), 0.0, math.nan)


class _Trace(NamedTuple):
    """What a traced step returns the values of.

    Attributes:
        frames: what was looked at.
        structure: what was found in each, of extents `None`: these are one tensor.
        variables: what is assigned again after a step that is not good.
    """

    frames: list[Frame]
    structure: Any
    variables: list[tf.Variable]

    def unpacked(self, values: list[tf.Tensor]) -> list[Any]:
        if self.structure is None:
            return list(values[0].numpy())
        return tf.nest.pack_sequence_as(self.structure, [value.numpy() for value in values])


_here = threading.local()  # `replica`: what the present thread runs


def _around_update(
    optimizer: Any, grads: list[Any], variables: list[Any], make: Callable[[], Any]
) -> Any:
    replica = getattr(_here, "replica", None)
    good = None
    if replica is not None:
        good = replica.before_update(optimizer, grads, variables)
    if good is None:
        return make()
    # The fastest way outside XLA. Several replicas cannot meet in a branch.
    return tf.cond(good, lambda: _nothing(make()), lambda: _nothing(None))


def _nothing(made: Any) -> tf.Tensor:
    return tf.constant(0)


def _look_at_loss(loss: Any, predictions: Any) -> Any:
    replica = getattr(_here, "replica", None)
    if replica is not None and replica.watch.looks_here():
        replica.look_at_loss(loss, predictions)
    return loss


class _Run:
    """A call of the training step, with one `_Replica` for each replica."""

    tentative: Tentative
    frames: list[Frame]
    structure: Any

    def __init__(self, step: CheckedStep, careful: bool):
        self.step, self.careful = step, careful

    def __call__(self, data: Any) -> Any:
        _here.replica = replica = _Replica(self)
        try:
            with self.tentative.joined(), replica.watch.open():
                replica.look_at_data(data)
                logs = self.step.train_step(data)
                good = replica.end(logs)
        finally:
            _here.replica = None
        return logs, replica.values(good)


class _Replica:
    """The step on one replica, while it is traced or run eagerly."""

    def __init__(self, run: _Run):
        self._run, self._step = run, run.step
        self._frames: list[Frame] = []
        self._found: list[Any] = []
        self._rates: list[tf.Tensor] = []
        self._scale: Any = None
        self._scaled_down = tf.constant(False)
        self._good: tf.Tensor | None = None
        self.watch = Watch(
            self._step.model, self._record, self._step.chosen, closely=self._step.dry
        )

    def _record(self, frame: Frame, tensor: Any, sequence: Any) -> None:
        self._frames.append(frame)
        self._found.append(self._step.measure(frame, tensor, sequence))

    def look_at_data(self, data: Any) -> None:
        """Looks at a batch, and at the weights where that is wanted."""
        parts = keras.utils.unpack_x_y_sample_weight(data)
        for prefix, part in zip(("x", "y", "sample_weight"), parts, strict=True):
            for name, tensor in named(prefix, part):
                self.watch.look("data", name, tensor)
        for variable in self._step.model.weights if self._step.weights else []:
            path = _keras.variables.path(variable)
            if self._step.chosen(path):
                self.watch.look("weight", path, _keras.variables.value(variable))

    def look_at_loss(self, loss: Any, predictions: Any) -> None:
        """Looks at a loss, and closely at what it is computed of."""
        for name, tensor in named("y_pred", predictions) if self._step.dry else []:
            self.watch.look("prediction", name, tensor)
        self.watch.look("loss", "loss", loss)

    def before_update(
        self, optimizer: Any, grads: list[Any], variables: list[Any]
    ) -> tf.Tensor | None:
        """Looks at gradients and learning rate, and decides whether the update is made.

        Returns:
            The decision, if it is left to the caller.
        """
        first = len(self._found)
        self._step.unused = [
            _keras.variables.path(variable)
            for gradient, variable in zip(grads, variables, strict=True)
            if gradient is None
        ]
        for gradient, variable in zip(grads, variables, strict=True):
            if gradient is not None:
                self.watch.look("weight gradient", _keras.variables.path(variable), gradient)
        gradients = self._found[first:]
        rates = []
        for leaf in wrapped_optimizers.leaves(optimizer):
            if wrapped_optimizers.has_learning_rate(leaf):
                rate = tf.convert_to_tensor(wrapped_optimizers.learning_rate(leaf))
                rates.append(tf.cast(rate, tf.float32))
                self.watch.look("learning rate", "learning rate", rates[-1])
        self._rates += rates
        scale = _loss_scale(optimizer)
        if scale is not None:
            self._scale = tf.cast(scale, tf.float32)
        if self._step.dry or self._run.careful:
            return None
        good = self._is_good()
        if scale is None and gradients:
            # What optimizers make of a gradient: its square, and its product with the rate.
            largest = tf.cast(tf.reduce_max(_stacked(gradients)), tf.float32)
            for factor in (1.0, *rates):
                good &= largest * factor < MODERATE
        self._good = self._agreed(good)
        if self._step.strategy.num_replicas_in_sync == 1 and not _graphs.in_xla():
            _keras_updates.build(optimizer, variables)
            self._run.tentative.decide_after(self._good)
            return self._good
        self._run.tentative.decide(self._good)
        return None

    def end(self, logs: Any) -> tf.Tensor:
        """Whether the step is good, known when it is over."""
        if self._step.dry:
            for variable in self._step.model.trainable_variables:
                if self._step.chosen(_keras.variables.path(variable)):
                    value = _keras.variables.value(variable)
                    self.watch.look("update", _keras.variables.path(variable), value)
            return tf.constant(False)
        if self._good is not None:
            return self._good
        if not self._step.is_keras_own and isinstance(logs, dict):
            for name, value in logs.items():
                if "loss" in name:
                    self.watch.look("loss", name, value)
        good = self._is_good()
        if self._run.careful:
            # (That of a scale that is lowered is left to the optimizer.)
            updated = [v for v in self._run.tentative.assigned if v.dtype.is_floating]
            good &= all_finite([variable.read_value() for variable in updated])
        return self._agreed(good)

    def _is_good(self) -> tf.Tensor:
        forward, backward = self._are_finite(FORWARD), self._are_finite(BACKWARD)
        good = forward
        for rate in self._rates:
            good &= tf.math.is_finite(rate) & (rate >= 0)
        if self._scale is not None:  # the optimizer lowers its scale, and leaves the step out
            lowers = self._scale > 1.0
            self._scaled_down = good & ~backward & lowers
            backward |= lowers
        return good & backward

    def _are_finite(self, kinds: tuple[str, ...]) -> tf.Tensor:
        pairs = zip(self._frames, self._found, strict=True)
        extents = [found for frame, found in pairs if frame.kind in kinds]
        if not extents:
            return tf.constant(True)
        stacked = _stacked(extents)
        return tf.reduce_all(tf.math.is_finite(stacked))

    def _agreed(self, good: tf.Tensor) -> tf.Tensor:
        """Whether the step is good on all replicas: a bad one of any is left out by all."""
        if self._step.strategy.num_replicas_in_sync == 1:
            return good
        context = tf.distribute.get_replica_context()
        bad = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(~good, tf.float32))
        return bad == 0

    def values(self, good: tf.Tensor) -> list[tf.Tensor]:
        """What the host is told: see `CheckedStep.__call__`."""
        if self._step.dry:
            structure, flat = self._found, tf.nest.flatten(self._found)
        else:
            structure, flat = None, [_stacked(self._found)]
        self._run.frames, self._run.structure = self._frames, structure
        scale = tf.constant(1.0) if self._scale is None else self._scale
        return [good, scale, self._scaled_down, *flat]


def _stacked(extents: list[tf.Tensor]) -> tf.Tensor:
    double = any(value.dtype == tf.float64 for value in extents)
    return tf.stack([tf.cast(value, tf.float64) for value in extents] if double else extents)


def _loss_scale(optimizer: Any) -> Any:
    for held in wrapped_optimizers.chain(optimizer):
        if _keras_steps.scales_loss(held):
            return _keras_steps.loss_scale(held)
    return None


def _is_safe(optimizer: Any) -> bool:
    """Whether finite gradients of moderate size never make a number that is not finite."""
    for leaf in wrapped_optimizers.leaves(optimizer):
        kind = type(leaf)
        if kind.__name__ not in SAFE or not kind.__module__.startswith("keras."):
            return False
        epsilon = getattr(leaf, "epsilon", 1.0)
        if not isinstance(epsilon, (int, float)) or epsilon < SMALLEST_EPSILON:
            return False
        if getattr(leaf, "centered", False) or wrapped_optimizers.is_legacy(leaf):
            return False
    return True


def _state(optimizer: Any) -> list[Any]:
    return list(optimizer.variables)


def tracked(model: keras.Model) -> list[tf.Variable]:
    """All variables of a model, of its metrics and optimizers, and of what else it holds."""
    found = [*model.variables, *(v for metric in model.metrics for v in metric.variables)]
    found += [v for v in tf.train.TrackableView(model).descendants() if isinstance(v, tf.Variable)]
    return list({id(v): v for v in map(_keras.variables.tf_variable, found)}.values())
