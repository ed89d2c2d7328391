"""Checked training step on one replica, while it is traced or run eagerly."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._graph import private_graph_apis
from tfwd._graph.tensor_origins import TensorOrigins
from tfwd._graph.tentative_assignments import Tentative, agreed, replica_parts
from tfwd._keras import training as _keras_training
from tfwd._keras import update_interception, wrapped_optimizers
from tfwd.finite import SQUARED_IS_FINITE, all_finite, largest
from tfwd.numerics.checked_tensors import BACKWARD, FORWARD, Frame, named, stored_values
from tfwd.numerics.python_counters import PythonCounters
from tfwd.numerics.step_watch import Watch

_here = threading.local()  # `step`: the step of the current thread


class Step(Protocol):
    """Interface of a checked step; see `CheckedStep`."""

    model: keras.Model
    train_step: Callable[[Any], Any]
    is_keras_own: bool
    dry: bool
    tells_largest: bool
    ignores: Callable[[Frame], bool]
    measure: Callable[[Frame, Any, Any], Any]
    finish: Callable[[tf.Tensor], tf.Tensor]
    unused: list[str]


class ReplicaStep:
    """Step of a `CheckedStep` on one replica.

    Args:
        step: the `CheckedStep`.
        tentative: the step's assignments.
        careful: bool. Also checks the new values of variables.
        past_methods: bool. True if operations may assign to variables without their methods.

    Attributes:
        frames: the checked tensors.
        structure: the structure of their measurements; `None` if they are extents.
        has_rows: bool. True if NaN in a gradient of rows would make an update fail.
        has_hidden_rows: bool. The same for an update in a branch or an inner function.
    """

    def __init__(self, step: Step, tentative: Tentative, careful: bool, past_methods: bool = False):
        self._step, self._tentative = step, tentative
        self._careful, self._past_methods = careful, past_methods
        self.frames: list[Frame] = []
        self.structure: Any = None
        self.has_rows = self.has_hidden_rows = False
        self._found: list[Any] = []
        self._largest: list[tf.Tensor] = []
        self._rates: list[tf.Tensor] = []
        self._scale: tf.Tensor | None = None
        self._scaled_down = tf.constant(False)
        self._finite_gradients: tf.Tensor | None = None  # on all replicas, for a loss scale
        self._has_update = False
        self._good: tf.Tensor | None = None
        self._updates_made = tf.constant(True)
        self._counters: list[PythonCounters] = []
        self._origins = TensorOrigins()
        self.watch = Watch(step.model, self._record, closely=step.dry, ignores=step.ignores)

    def __call__(self, data: Any) -> tuple[Any, list[tf.Tensor]]:
        """Runs the step. Returns its logs, and the list `[good, scaled_down, *measurements]`."""
        _here.step = self
        self._step.unused.clear()
        try:
            recorded = self._origins.recorded() if self._step.dry else contextlib.nullcontext()
            with self._tentative.joined(), recorded, self.watch.open():
                self._check_data(data)
                logs = self._step.train_step(data)
                good = self._decide_at_end(logs)
        finally:
            _here.step = None
            if self._step.dry:
                self._restore_counters()
        if tf.executing_eagerly() and not good:
            self._restore_counters()
        found = self._found
        if self._step.dry:
            self.structure, found = found, tf.nest.flatten(found)
        else:
            found = [self._step.finish(_stacked(found))]
        if self._step.tells_largest:
            found.append(_stacked(self._largest))
        return logs, [good, self._scaled_down & good, *found]

    def keep_counters(self, optimizer: Any, variables: list[Any]) -> None:
        """Keeps an optimizer's numbers in Python, before an update that may be undone."""
        if tf.executing_eagerly() and _replicas() == 1:  # the first update would build it
            _keras_training.build_optimizer(optimizer, variables)
        self._counters.append(PythonCounters(wrapped_optimizers.leaves(optimizer)))

    def _restore_counters(self) -> None:
        for counters in reversed(self._counters):
            counters.restore()

    def _record(self, frame: Frame, tensor: Any, sequence: Any) -> None:
        if self._step.dry and frame.kind in FORWARD:
            frame = frame._replace(origins=self._origins.of(tensor))
        self.frames.append(frame)
        self._found.append(self._step.measure(frame, tensor, sequence))
        if self._step.tells_largest:
            self._largest.append(largest(tensor))

    def _check_data(self, data: Any) -> None:
        parts = keras.utils.unpack_x_y_sample_weight(data)
        for prefix, part in zip(("x", "y", "sample_weight"), parts, strict=True):
            for name, tensor in named(prefix, part):
                self._origins.add(name, tensor)
                self.watch.check("data", name, stored_values(tensor))
        if self._step.dry:
            self._check_weights("weight", _keras.variables.weights(self._step.model))

    def _check_weights(self, kind: str, variables: Sequence[Any]) -> None:
        for variable in variables:
            path = _keras.variables.path(variable)
            self.watch.check(kind, path, _keras.variables.value(variable))

    def check_loss(self, loss: Any, predictions: Any) -> None:
        """Checks a loss, and in a diagnosis also the predictions."""
        for name, tensor in named("y_pred", predictions) if self._step.dry else []:
            self.watch.check("prediction", name, tensor)
        if self._step.dry:
            self._check_added_losses()
        self.watch.check("loss", "loss", loss)

    def _check_added_losses(self) -> None:
        """Checks the losses that layers add, by `add_loss` and by regularizers."""
        model = self._step.model
        for layer in _keras.layers.all_layers(model):
            # A layer that contains layers also lists their losses.
            is_one = layer is not model and not _keras.layers.sublayers(layer)
            found = layer.losses if is_one else _keras.layers.own_losses(layer)
            # Losses of a layer that runs in a separate function cannot be used here.
            here = _keras.present_graph()
            losses = [
                one
                for one in found
                if isinstance(one, tf.Tensor) and getattr(one, "graph", None) is here
            ]
            if losses:
                added = tf.add_n([tf.cast(one, tf.float32) for one in losses])
                self.watch.check("added loss", layer.name, added, layer, call=1)

    def before_update(
        self, optimizer: Any, grads: list[Any], variables: list[Any]
    ) -> tf.Tensor | None:
        """Checks the gradients and the learning rate, and decides whether to apply the update.

        Returns:
            The decision, if the caller must branch on it; otherwise None.
        """
        self._has_update = True
        if self._past_methods:
            self._keep_state(optimizer, variables)
        scaling = [x for x in wrapped_optimizers.chain(optimizer) if _keras_training.scales_loss(x)]
        if scaling:  # an optimizer around another one turns off the other one's scale
            self._scale = tf.cast(_keras_training.loss_scale(scaling[0]), tf.float32)
        factor = wrapped_optimizers.gradient_scale(optimizer)
        first = len(self._found)
        for gradient, variable in zip(grads, variables, strict=True):
            path = _keras.variables.path(variable)
            if gradient is None:
                self._step.unused.append(path)
            else:
                self.watch.check("weight gradient", path, _divided(gradient, factor))
        gradients = self._found[first:]
        scale = factor if self._scale is None else self._scale
        if scale is not None:
            self.watch.check("loss scale", "loss scale", tf.cast(scale, tf.float32))
        for leaf in wrapped_optimizers.leaves(optimizer):
            if wrapped_optimizers.has_learning_rate(leaf):
                rate = tf.convert_to_tensor(wrapped_optimizers.learning_rate(leaf))
                self._rates.append(tf.cast(rate, tf.float32))
                self.watch.check("learning rate", "learning rate", self._rates[-1])
        if self._scale is not None and _replicas() > 1:
            self._agree_on_overflow(grads)
        if self._step.dry or self._careful:
            return self._made_if_finite(optimizer, grads, variables)
        good = self._is_good()
        if gradients:
            # Optimizers compute the square of a gradient, and its product with the learning rate.
            largest_extent = self._step.finish(tf.reduce_max(_stacked(gradients)))
            largest_gradient = tf.cast(largest_extent, tf.float32)
            is_moderate = tf.constant(True)
            for number in (largest_gradient, *self._rates):  # rates multiply a weight decay, too
                is_moderate &= number < SQUARED_IS_FINITE
            for rate in self._rates:
                is_moderate &= largest_gradient * rate < SQUARED_IS_FINITE
            good &= is_moderate | self._scaled_down  # the optimizer skips a step that scales down
        self._good = agreed(good)
        if _replicas() == 1 and not private_graph_apis.in_xla():
            # A branch is fastest, but several replicas cannot synchronize inside a branch.
            with tf.init_scope():
                _keras_training.build_optimizer(optimizer, variables)
            self._tentative.decide_after(self._good)
            return self._good
        self._tentative.decide(self._good)
        if update_interception.has_rows(grads) and not private_graph_apis.in_xla():
            _replace_by_zeros(grads, ~self._good)
        return None

    def _made_if_finite(
        self, optimizer: Any, grads: list[Any], variables: list[Any]
    ) -> tf.Tensor | None:
        """Prevents that an update fails because of NaN, in a step that is undone if it is bad.

        Returns:
            The decision, if the caller must branch on it; otherwise None.
        """
        if not update_interception.has_rows(grads) or private_graph_apis.in_xla():
            return None
        self.has_rows = True
        present = [gradient for gradient in grads if gradient is not None]
        is_finite = all_finite(present) if self._step.dry else self._is_good()
        if _replicas() > 1:  # several replicas cannot synchronize inside a branch
            _replace_by_zeros(grads, ~is_finite)
            return None
        with tf.init_scope():
            _keras_training.build_optimizer(optimizer, variables)
        self._updates_made &= is_finite
        return is_finite

    def _agree_on_overflow(self, grads: list[Any]) -> None:
        """Makes all replicas scale down if the gradients of one of them are not finite.

        Keras 3 decides by the gradients of the first replica, before they are added. It would apply
        gradients that overflow on another replica. So all replicas get NaN then.

        Args:
            grads: Gradients on this replica. One of them is replaced.
        """
        present = [i for i, gradient in enumerate(grads) if gradient is not None]
        if not present:
            return  # Keras raises an error
        is_finite = (
            all_finite([grads[i] for i in present])
            if self._step.dry
            else self._are_finite(BACKWARD)
        )
        self._finite_gradients = agreed(is_finite)

        def or_nan(values: tf.Tensor) -> tf.Tensor:
            return tf.where(self._finite_gradients, values, tf.constant(math.nan, values.dtype))

        grads[present[0]] = _with_values(grads[present[0]], or_nan)

    def before_hidden_update(self, optimizer: Any, grads: list[Any], variables: list[Any]) -> None:
        """Prepares an update in a branch or an inner function.

        It is checked by the values that it assigns.
        """
        self._refuse_hidden_scale()
        self.has_hidden_rows |= update_interception.has_rows(grads)
        with tf.init_scope():
            _keras_training.build_optimizer(optimizer, variables)

    def _keep_state(self, optimizer: Any, variables: list[Any]) -> None:
        """Builds an optimizer whose first step creates its state, and reads the state.

        Operations may assign to the state without the methods of variables.
        """
        with tf.init_scope():
            _keras_training.build_optimizer(optimizer, variables)
        for variable in _keras_training.optimizer_state(optimizer):
            self._tentative.keep(_keras.variables.tf_variable(variable))

    def _refuse_hidden_scale(self) -> None:
        """Raises an error if an update that is not seen in this graph may lower a loss scale."""
        for optimizer in _keras_training.optimizers(self._step.model):
            if any(map(_keras_training.scales_loss, wrapped_optimizers.chain(optimizer))):
                raise ValueError(
                    f"FiniteCheck cannot check the loss scale of a {type(optimizer).__name__} in a "
                    "branch or an inner function: apply its gradients in train_step itself"
                )

    def _decide_at_end(self, logs: Any) -> tf.Tensor:
        """Returns whether the step is good. The step must have ended."""
        if not self._has_update and _keras.present_graph() is not None:
            self._refuse_hidden_scale()
        has_loss = any(frame.kind == "loss" for frame in self.frames)
        if self._good is None and not has_loss and isinstance(logs, dict):
            for name, value in logs.items():
                if "loss" in name:
                    self.watch.check("loss", name, value)
        if self._step.dry:
            for variable, value in self._new_values():
                self.watch.check("update", _keras.variables.path(variable), value)
            return tf.constant(False)
        if self._good is not None:
            return self._good
        # Metrics and the states of layers may be NaN. They are not checked.
        values = [value for _, value in self._new_values() if value.dtype.is_floating]
        return agreed(self._is_good() & self._updates_made & all_finite(values))

    def _new_values(self) -> Iterator[tuple[Any, tf.Tensor]]:
        """Yields the variables that optimizers update, with the values after the update.

        Elements of an optimizer's state that were not finite before are 0, because no update made
        them so: the best loss of an optimizer may be infinite until it is known.
        """
        model = self._step.model
        for variable in _keras.variables.trainable_variables(model):
            yield from self._values_of(variable)
        for optimizer in _keras_training.optimizers(model):
            for state in _keras_training.optimizer_state(optimizer):
                before = self._tentative.value_before(_keras.variables.tf_variable(state))
                for variable, value in self._values_of(state) if before is not None else ():
                    if value.dtype.is_floating:
                        value = tf.where(tf.math.is_finite(before), value, tf.zeros_like(value))
                    yield variable, value

    def _values_of(self, variable: Any) -> Iterator[tuple[Any, tf.Tensor]]:
        """Yields a variable with its value, or its copies on all replicas that are assigned to."""
        if self._step.dry or self._past_methods:  # operations may have assigned to it
            yield variable, tf.convert_to_tensor(_keras.variables.value(variable))
            return
        for part in replica_parts(variable):
            if self._tentative.has_assigned(part):
                yield part, part.read_value()

    def _is_good(self) -> tf.Tensor:
        forward, backward = self._are_finite(FORWARD), self._finite_gradients
        if backward is None:
            backward = self._are_finite(BACKWARD)
        good = forward
        for rate in self._rates:
            good &= tf.math.is_finite(rate) & (rate >= 0)
        if self._scale is not None:  # the optimizer lowers its scale, and skips the step
            lowers = self._scale > 1.0
            self._scaled_down = good & ~backward & lowers
            backward |= lowers
        return good & backward

    def _are_finite(self, kinds: tuple[str, ...]) -> tf.Tensor:
        pairs = zip(self.frames, self._found, strict=True)
        extents = [found for frame, found in pairs if frame.kind in kinds]
        return tf.reduce_all(tf.math.is_finite(_stacked(extents))) if extents else tf.constant(True)


def update_if_good(
    optimizer: Any, grads: list[Any], variables: list[Any], make: Callable[[], Any]
) -> None:
    """Calls `make`, which applies an update, unless the current thread's step is bad."""
    step = getattr(_here, "step", None)
    good = None
    if step is not None and step.watch.is_in_watched_graph():
        good = step.before_update(optimizer, grads, variables)
    elif step is not None:
        step.before_hidden_update(optimizer, grads, variables)
    if step is not None and good is None:
        step.keep_counters(optimizer, variables)

    def made() -> tf.Tensor:
        make()
        return tf.constant(True)

    if good is None:
        make()
    else:
        tf.cond(good, made, lambda: tf.constant(False))


def _replicas() -> int:
    return tf.distribute.get_strategy().num_replicas_in_sync


def check_loss(loss: Any, predictions: Any) -> Any:
    """Checks a loss in the step of the current thread, and returns the loss."""
    step = getattr(_here, "step", None)
    if step is not None and step.watch.is_in_watched_graph():
        step.check_loss(loss, predictions)
    return loss


def _divided(gradient: Any, factor: Any) -> Any:
    """Returns a gradient divided by the factor of its loss, as the optimizer divides it."""
    if factor is None:
        return gradient
    return _with_values(gradient, lambda values: values / tf.cast(factor, values.dtype))


def _with_values(gradient: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Returns a gradient with changed values. A `tf.IndexedSlices` keeps its indices."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return change(gradient)


def _replace_by_zeros(grads: list[Any], bad: tf.Tensor) -> None:
    """Replaces the gradients in a list by zeros if `bad`."""
    for i, gradient in enumerate(grads):
        if gradient is not None:
            grads[i] = _with_values(gradient, lambda g: tf.where(bad, tf.zeros_like(g), g))


def _stacked(extents: list[tf.Tensor]) -> tf.Tensor:
    double = any(value.dtype == tf.float64 for value in extents)
    return tf.stack([tf.cast(value, tf.float64) for value in extents] if double else extents)
