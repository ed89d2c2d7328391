"""`CheckFinite`: a layer that looks for NaN and infinities in what passes it, both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd._graph import graphs
from tfwd._graph.custom_gradient import custom_gradient
from tfwd.finite import Summary, all_finite, can_be_non_finite, is_watching, summarize

ACTIONS = ("raise", "count")
FORWARD, BACKWARD = "forward pass", "backward pass"
Look = Callable[[Any], Any]  # from a tensor to the tensor, which was looked at


@keras.saving.register_keras_serializable("tfwd")
class CheckFinite(keras.layers.Layer):
    """The identity, which looks for NaN and infinities on the way forward and on the way back.

    Outputs are the inputs and gradients are the gradients, bit for bit, in their own dtype. What is
    not finite is reported by the name of the layer:

        layer 'scores': forward pass has 12.50 % non-finite elements (16 NaN, 0 +Inf, 0 -Inf of 128)

    With `action="raise"` that is an error, in eager mode and in graphs, before anything behind the
    layer sees the tensor. XLA leaves out all that could stop a program, so a model with such a
    layer is not compiled by Keras 3 unless it is told to, and refused then. Under
    `tfwd.callbacks.FiniteCheck`, which looks at every layer and works under XLA, this one does
    nothing.

    With `action="count"` elements are counted, in every mode and never with an error: `report()`
    says what was found since `reset()`, on all replicas together.

    Args:
        action: "raise" or "count".
        **kwargs: as for any layer.

    Attributes:
        forward_counts, backward_counts: with `action="count"`, int64 variables of what was found:
            how many NaN, +Inf, -Inf, and how many elements in all. They are saved with the layer,
            but are none of its weights: a model has the same with such layers and without.

    Input and output: tensors, or a nest of them, of any dtype. Only floating and complex ones are
    looked at. Masks go through.

    Raises:
        ValueError: the action is neither of the two; at a call that XLA compiles with "raise".
        tf.errors.InvalidArgumentError: when the program runs, for what is not finite with "raise".

    Example:

    >>> import tensorflow as tf
    >>> from tfwd import layers
    >>> check = layers.CheckFinite(action="count", name="scores")
    >>> y = check(tf.constant([[1.0, float("nan")], [2.0, float("inf")]]))
    >>> check.report()
    "layer 'scores': forward pass has 50.00 % non-finite elements (1 NaN, 1 +Inf, 0 -Inf of 4)"

    References: Caffe's debug option `checkFiniteLayer`.
    """

    forward_counts: keras.Variable
    backward_counts: keras.Variable

    def __init__(self, action: str = "raise", **kwargs: Any) -> None:
        # What comes in keeps its dtype.
        super().__init__(**{"autocast": False, **kwargs})
        if action not in ACTIONS:
            raise ValueError(
                f"CheckFinite '{self.name}': action={action!r}: give one of {', '.join(ACTIONS)}"
            )
        self.action = action
        self.supports_masking = True
        if action == "raise":
            self.supports_jit = False  # asked for by Keras 3 where it may choose
            return
        # Here and not in `build`, so that they are there before the first call.
        _keras.variables.add_counter(self, "forward_counts", (4,))
        _keras.variables.add_counter(self, "backward_counts", (4,))

    def build(self, input_shape: Any = None) -> None:
        self.built = True

    def call(self, inputs: Any) -> Any:
        if self.action == "raise":
            if is_watching():
                return inputs
            if graphs.in_xla():
                raise ValueError(
                    f"CheckFinite '{self.name}' cannot stop a program that XLA compiles: compile "
                    "without jit_compile=True, or use CheckFinite(action='count') or "
                    "tfwd.callbacks.FiniteCheck, which work there"
                )
        flat = tf.nest.flatten(inputs, expand_composites=True)
        watched = [isinstance(x, tf.Tensor) and can_be_non_finite(x) for x in flat]
        several = sum(watched) > 1
        checked = [
            self._checked(x, f", input {number}" if several else "") if looked_at else x
            for number, (x, looked_at) in enumerate(zip(flat, watched, strict=True))
        ]
        return tf.nest.pack_sequence_as(inputs, checked, expand_composites=True)

    def _checked(self, x: tf.Tensor, which: str) -> tf.Tensor:
        if self.action == "raise":
            return _both_ways(
                x,
                lambda tensor: _stopped(tensor, f"layer '{self.name}'{which}: {FORWARD}"),
                lambda tensor: _stopped(tensor, f"layer '{self.name}'{which}: {BACKWARD}"),
            )
        held = graphs.held_here(_keras.variables.tf_variable(self.backward_counts))
        return _both_ways(
            x,
            lambda tensor: _counted(tensor, self.forward_counts),
            lambda tensor: _counted(tensor, self.backward_counts, held),
        )

    def report(self) -> str:
        """What was counted: a line for each way on which anything was not finite.

        Returns:
            The lines, or "" if there is nothing to say: always, with `action="raise"`.
        """
        lines = []
        for way, variable in zip((FORWARD, BACKWARD), self._counts(), strict=False):
            nan, positive, negative, size = _total(variable)
            summary = Summary(size, nan, positive, negative, 0, 0.0, 0.0)
            if summary.non_finite:
                lines.append(f"layer '{self.name}': {way} has {summary}")
        return "\n".join(lines)

    def reset(self) -> None:
        """Begins to count anew."""
        for variable in self._counts():
            _set(variable, np.zeros(4, "int64"))

    def _counts(self) -> list[keras.Variable]:
        return [self.forward_counts, self.backward_counts] if self.action == "count" else []

    def load_own_variables(self, store: Any) -> None:
        """Reads what was saved; see Keras."""
        # The file of a model without the layer has none: they stay.
        for number, variable in enumerate(self._counts()):
            if str(number) in store:
                _set(variable, np.asarray(store[str(number)]))

    def save_own_variables(self, store: Any) -> None:
        """Saves what was counted, on all replicas together; see Keras."""
        for number, variable in enumerate(self._counts()):
            store[str(number)] = _total(variable)

    def unwrapped(self) -> keras.layers.Layer:
        """A plain Keras layer that does the same: `Identity`."""
        plain = keras.layers.Identity(name=self.name, dtype=self.dtype_policy, autocast=False)
        plain.supports_masking = True
        return plain

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "action": self.action}


def _both_ways(x: tf.Tensor, forward: Look, backward: Look) -> tf.Tensor:
    @custom_gradient
    def tap(x: tf.Tensor) -> tuple[tf.Tensor, Look]:
        return tf.identity(x), backward

    return tap(forward(x))


def _stopped(tensor: Any, whose: str) -> Any:
    """The tensor, for which whoever uses it waits until it was looked at."""

    def stop() -> tf.Tensor:
        tf.debugging.Assert(False, [whose + " has " + _in_words(summarize(tensor))])
        return tf.constant(False)

    looked = tf.cond(all_finite([tensor]), lambda: tf.constant(True), stop)
    with tf.control_dependencies([looked]):
        return tf.nest.map_structure(tf.identity, tensor, expand_composites=True)


def _counted(tensor: Any, counts: keras.Variable, held: tf.Tensor | None = None) -> Any:
    """The tensor, whose elements were counted.

    Args:
        tensor: the tensor.
        counts: what is added to.
        held: the resource of `counts` in a loop or a branch.
    """
    summary = summarize(tensor)
    found = tf.stack([summary.nan, summary.positive_inf, summary.negative_inf, summary.size])
    if held is None:
        _add(counts, found)
    else:
        tf.raw_ops.AssignAddVariableOp(resource=held, value=found)
    return tensor


def _replicas(counts: keras.Variable) -> list[tf.Variable]:
    """What each replica has counted in."""
    plain = _keras.variables.tf_variable(counts)
    return list(getattr(plain, "values", [plain]))


def _add(counts: keras.Variable, found: tf.Tensor) -> None:
    replicas = _replicas(counts)
    if len(replicas) > 1 and tf.distribute.in_cross_replica_context():
        replicas[0].assign_add(found)
    else:
        _keras.variables.assign(counts, _keras.variables.value(counts) + found)


def _total(counts: keras.Variable) -> np.ndarray:
    return sum(part.numpy() for part in _replicas(counts))


def _set(counts: keras.Variable, total: np.ndarray) -> None:
    first, *others = _replicas(counts)
    first.assign(total)
    for part in others:
        part.assign(np.zeros_like(total))


def _in_words(summary: Summary) -> tf.Tensor:
    """As `Summary.__str__`, in graphs too."""
    percent = 100.0 * tf.cast(summary.non_finite, tf.float64) / tf.cast(summary.size, tf.float64)
    share = tf.where(
        percent < 0.005,
        tf.strings.as_string(percent, precision=2, shortest=True),
        tf.strings.as_string(percent, precision=2),
    )
    counts = (summary.nan, summary.positive_inf, summary.negative_inf, summary.size)
    nan, positive, negative, size = map(tf.strings.as_string, counts)
    words = (share, " % non-finite elements (", nan, " NaN, ", positive, " +Inf, ")
    return tf.strings.join([*words, negative, " -Inf of ", size, ")"])
