"""Compiles a model's own training step, and applies it only if all its tensors are finite.

The step is the model's `train_step`, as `fit` calls it. The step returns the results of its checks
to the host, because XLA removes operations that would stop the program. The variables change only
if

    good = all(finite(data, forward, loss, backward, learning rate)) on all replicas.

This uses `tfwd._graph.tentative_assignments`. Most optimizers turn finite gradients of moderate
size into finite values. With these optimizers, the step decides before the first assignment. With
other optimizers, and in a custom training step, it also checks the new values. It undoes the
assignments if a new value is not finite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._graph.tentative_assignments import Tentative, replica_parts
from tfwd._keras import training as _keras_training
from tfwd._keras import update_interception
from tfwd.finite import exact_extent, extents_from_raw, raw_extent
from tfwd.numerics.checked_step.replica_step import ReplicaStep, check_loss, update_if_good
from tfwd.numerics.checked_step.safe_updates import (
    has_own_constraint,
    has_short_floats,
    is_safe,
)
from tfwd.numerics.checked_step.tracked_variables import assign_all, tracked
from tfwd.numerics.checked_tensors import Frame
from tfwd.numerics.leaf_optimizers import leaf_optimizers


class Outcome(NamedTuple):
    """Result of a checked step.

    Attributes:
        logs: the return value of the model's `train_step`.
        good: bool. True if the step was applied.
        scaled_down: bool. True if only scaled gradients were not finite. The optimizer then lowers
            the scale of its loss.
        frames: the checked tensors, in the order of computation.
        found: for each replica, the measurement of each frame.
        largest: for each replica, the largest absolute value of each frame if it is finite. Empty
            unless requested.
    """

    logs: Any
    good: bool
    scaled_down: bool
    frames: list[Frame]
    found: list[list[Any]]
    largest: list[list[float]]


class _Trace(NamedTuple):
    """Structure of the values that a traced step returns.

    Attributes:
        frames: the checked tensors.
        structure: the structure of their measurements; `None` if they are extents in one tensor.
        variables: the variables to reset after a bad step.
    """

    frames: list[Frame]
    structure: Any
    variables: list[tf.Variable]

    def unpacked(self, values: list[tf.Tensor]) -> list[Any]:
        if self.structure is None:
            return list(values[0].numpy())
        return tf.nest.pack_sequence_as(self.structure, [value.numpy() for value in values])


class CheckedStep:
    """Checked training step of a compiled model, for a batch on the host.

    Args:
        model: the compiled model, as in `fit`.
        measure: function of a frame, its tensor (or a nest of tensors) and the third argument of
            `Watch`. It returns the measurement. If it is given, the step is only examined, and all
            variables keep their values. Default None, for the `extent`.
        exact: bool. Checks each element. Default False, which checks each tensor in one pass. One
            pass cannot decide for some tensors.
        tells_largest: bool. Also finds the largest absolute value of each tensor. Default False.
        ignores: function that returns True for frames to ignore. By default no frame is ignored.

    Attributes:
        unused: list of the paths of weights that no gradient reached, known after a step.
    """

    def __init__(
        self,
        model: keras.Model,
        measure: Callable[[Frame, Any, Any], Any] | None = None,
        exact: bool = False,
        tells_largest: bool = False,
        ignores: Callable[[Frame], bool] = lambda frame: False,
    ):
        self.model, self.dry = model, measure is not None
        self.tells_largest, self.ignores = tells_largest, ignores
        self.measure = measure or (_exact_probe if exact else _probe)
        self.finish = extents_from_raw if measure is None and not exact else tf.identity
        self.unused: list[str] = []
        self.strategy = model.distribute_strategy
        self.train_step = _keras_training.train_step(model)
        self.is_keras_own = _keras.is_own_step(model)
        self._exact = exact
        self._traces: list[_Trace] = []
        # True if an operation inside an update may fail. It is unknown before the first step.
        may_fail = self._restores_failures() and update_interception.may_have_rows(model)
        self._may_fail: bool | None = None if may_fail else False
        self._function = _Compiled(model, self._on_batch)

    def __call__(self, data: Any, spec: Any = None) -> Outcome:
        """Runs the step on a batch.

        Args:
            data: the batch, as the dataset of `fit` yields it.
            spec: the dataset's `element_spec`. The step is traced for the shapes for which `fit`
                traces. Default None, for the shapes of the batch.
        """
        kept = self._kept()
        try:
            logs, number, values, before = self._function(data, spec)
        except tf.errors.InvalidArgumentError:
            assign_all(kept)
            raise
        trace = self._traces[int(number)]
        # For each replica, the list that its `ReplicaStep` returned.
        local = self.strategy.experimental_local_results
        replicas = [list(one) for one in zip(*map(local, values), strict=True)]
        good, scaled_down = replicas[0][:2]
        largest = [one.pop().numpy().tolist() for one in replicas] if self.tells_largest else []
        if not good:
            assign_all(zip(trace.variables, before, strict=True))
        return Outcome(
            _keras.multi_worker_fit.reduced(self.model, logs),
            bool(good),
            bool(scaled_down),
            trace.frames,
            [trace.unpacked(one[2:]) for one in replicas],
            largest,
        )

    def _restores_failures(self) -> bool:
        """Returns True if a failed operation of a graph may leave variables changed.

        Operations do not fail under XLA. An eager step undoes its own assignments, and a diagnosis
        restores all variables.
        """
        return not (self.dry or self.model.run_eagerly or self.model.jit_compile)

    def _kept(self) -> list[tuple[tf.Variable, tf.Tensor]]:
        """Returns all variables with their values, if an update of this step may fail."""
        if self._may_fail is False:
            return []
        parts = [part for variable in tracked(self.model) for part in replica_parts(variable)]
        return [(part, part.read_value()) for part in parts]

    def _on_batch(self, data: Any) -> Any:
        optimizers = _keras_training.optimizers(self.model)
        leaves = leaf_optimizers(self.model)
        by_methods = all(map(update_interception.assigns_by_methods, leaves))
        is_known = self.is_keras_own and self.model.built
        safe = is_known and all(map(is_safe, leaves)) and not has_short_floats(self.model)
        careful = self._exact or not safe or has_own_constraint(self.model)
        # Operations may assign to a variable without its methods.
        past_methods = not (by_methods and self.is_keras_own)
        known = tracked(self.model)
        if not careful:  # the optimizer's variables are assigned only after the decision
            # With several replicas, a loss scale is assigned in threads that know no decision.
            inner = leaves if self.strategy.num_replicas_in_sync > 1 else optimizers
            states = (v for one in inner for v in _keras_training.optimizer_state(one))
            updated = [*_keras.variables.trainable_variables(self.model), *states]
            ids = {id(_keras.variables.tf_variable(variable)) for variable in updated}
            known = [variable for variable in known if id(variable) not in ids]
        steps: list[ReplicaStep] = []
        with contextlib.ExitStack() as stack:
            tentative = stack.enter_context(Tentative(known))
            stack.enter_context(update_interception.entered(optimizers, update_if_good))
            stack.enter_context(update_interception.inlined(leaves))
            stack.enter_context(_keras.computed_loss(self.model, check_loss))

            def on_replica(data: Any) -> Any:
                steps.append(ReplicaStep(self, tentative, careful, past_methods))
                return steps[-1](data)

            try:
                logs, values = self.strategy.run(on_replica, args=(data,))
            except BaseException:
                if self.model.run_eagerly:  # an operation of the step has failed
                    assign_all(tentative.before(all_known=True))
                raise
        if self._restores_failures():
            is_hidden = any(step.has_hidden_rows for step in steps)
            is_unsafe = not all(map(is_safe, leaves)) and any(step.has_rows for step in steps)
            self._may_fail = bool(self._may_fail) or is_hidden or is_unsafe
        before = tentative.before(all_known=past_methods)
        if self.model.run_eagerly:
            self._traces.clear()  # only the last trace is used
        variables = [variable for variable, _ in before]
        self._traces.append(_Trace(steps[0].frames, steps[0].structure, variables))
        return logs, tf.constant(len(self._traces) - 1), values, [value for _, value in before]


def plain_step(model: keras.Model) -> Callable[[Any, Any], Any]:
    """Returns the unchecked training step of a compiled model, for a batch and its spec."""
    step = _keras_training.train_step(model)
    function = _Compiled(model, lambda data: model.distribute_strategy.run(step, args=(data,)))
    return lambda data, spec: _keras.multi_worker_fit.reduced(model, function(data, spec))


class _Compiled:
    """Function of a batch, compiled like its model: eager, as a graph, or by XLA.

    It is traced once for all batch sizes, as in Keras. With a trace for each size, layers with
    stateful operations would draw again.
    """

    def __init__(self, model: keras.Model, function: Callable[[Any], Any]):
        self._model, self._function = model, function
        self._any = self._of_specs(function, None)
        self._by_spec: dict[Any, Callable[..., Any]] = {}

    def __call__(self, data: Any, spec: Any = None) -> Any:
        parts = tf.nest.flatten(data)
        specs = [] if spec is None else tf.nest.flatten(spec)
        given = _keras_training.batch(data)
        plain = len(parts) == len(specs) and all(map(_is_of, parts, specs))
        if self._model.run_eagerly or not plain:
            return self._any(given)
        kept = [i for i, part in enumerate(parts) if isinstance(part, tf.Tensor)]
        structure = repr(tf.nest.map_structure(lambda part: None, given))
        key = (structure, *((i, specs[i]) for i in kept))
        if key not in self._by_spec:

            def of_parts(*tensors: tf.Tensor) -> Any:
                values: list[Any] = [None] * len(parts)
                for i, tensor in zip(kept, tensors, strict=True):
                    values[i] = tensor
                return self._function(tf.nest.pack_sequence_as(given, values))

            self._by_spec[key] = self._of_specs(of_parts, [specs[i] for i in kept])
        return self._by_spec[key](*(parts[i] for i in kept))

    def _of_specs(self, function: Callable[..., Any], specs: Any) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return function
        return tf.function(
            function,
            input_signature=specs,
            reduce_retracing=specs is None,
            jit_compile=bool(self._model.jit_compile),
            autograph=False,
        )


def _is_of(part: Any, spec: Any) -> bool:
    """Returns True if a part of a batch is a tensor that fits a spec, or an absent optional."""
    if isinstance(part, tf.Tensor):
        return isinstance(spec, tf.TensorSpec) and spec.is_compatible_with(part)
    return isinstance(part, tf.experimental.Optional)


def _probe(frame: Frame, tensor: Any, sequence: Any) -> tf.Tensor:
    return raw_extent(tensor)


def _exact_probe(frame: Frame, tensor: Any, sequence: Any) -> tf.Tensor:
    return exact_extent(tensor)
