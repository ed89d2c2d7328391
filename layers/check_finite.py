"""`CheckFinite`: a layer that checks its input and its gradient for NaN and infinities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd._graph import loss_logits, private_graph_apis
from tfwd._graph.custom_gradient import custom_gradient
from tfwd.current_watch import is_watching
from tfwd.finite import Summary, all_finite, can_be_non_finite, summarize

ACTIONS = ("raise", "count")
FORWARD, BACKWARD = "forward pass", "backward pass"
Check = Callable[[Any], Any]  # takes a tensor, checks it and returns it


@keras.saving.register_keras_serializable("tfwd")
class CheckFinite(keras.layers.Layer):
    """An identity layer that checks its input and its gradient for NaN and infinities.

    Outputs equal inputs, bit for bit, in their own dtype. Gradients pass through unchanged too. A
    report names the layer:

        layer 'scores': forward pass has 12.50 % non-finite elements (16 NaN, 0 +Inf, 0 -Inf of 128)

    With `action="raise"` non-finite elements raise an error, in eager mode and in graphs. The error
    comes before a later layer uses the tensor. XLA removes all operations that could stop a
    program. So Keras 3 does not choose XLA for a model with such a layer, and `jit_compile=True`
    raises an error. `tfwd.callbacks.FiniteCheck` checks every layer, also under XLA. Under that
    callback this layer does nothing.

    With `action="count"` the layer counts elements in every mode and never raises an error.
    `report()` returns the counts since `reset()`, summed over all replicas.

    Args:
        action: "raise" or "count". Default "raise".
        **kwargs: Arguments of every Keras layer, such as `name`.

    Attributes:
        forward_counts, backward_counts: int64 variables `[4]`, only with `action="count"`. They
            hold the numbers of NaN, +Inf, -Inf, and of all elements. They are saved with the layer,
            but are not in `weights`: a model has the same weights with and without such layers.

    Input and output: A tensor or a nest of tensors, of any dtype. Only floating and complex tensors
    are checked. Masks pass through.

    Raises:
        ValueError: If the action is unknown, or if XLA compiles a call with "raise".
        tf.errors.InvalidArgumentError: While the program runs, for non-finite elements with
            "raise".

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
        # The input keeps its dtype.
        super().__init__(**{"autocast": False, **kwargs})
        if action not in ACTIONS:
            raise ValueError(
                f"CheckFinite '{self.name}': action={action!r}: expected one of "
                f"{', '.join(ACTIONS)}"
            )
        self.action = action
        self.supports_masking = True
        if action == "raise":
            self.supports_jit = False  # Keras 3 reads it if jit_compile="auto"
            return
        # Created here and not in `build`, so that the counters exist before the first call.
        _keras.checkpointed_state.add_counter(self, "forward_counts", (4,))
        _keras.checkpointed_state.add_counter(self, "backward_counts", (4,))

    def build(self, input_shape: Any = None) -> None:
        self.built = True

    def call(self, inputs: Any) -> Any:
        if self.action == "raise":
            if is_watching():
                return inputs
            if private_graph_apis.in_xla():
                raise ValueError(
                    f"CheckFinite '{self.name}' cannot stop a program that XLA compiles: compile "
                    "without jit_compile=True, or use CheckFinite(action='count') or "
                    "tfwd.callbacks.FiniteCheck, which work there"
                )
        flat = tf.nest.flatten(inputs, expand_composites=True)
        watched = [isinstance(x, tf.Tensor) and can_be_non_finite(x) for x in flat]
        several = sum(watched) > 1
        checked = [
            self._checked(x, f", input {number}" if several else "") if is_checked else x
            for number, (x, is_checked) in enumerate(zip(flat, watched, strict=True))
        ]
        return tf.nest.pack_sequence_as(inputs, checked, expand_composites=True)

    def _checked(self, x: tf.Tensor, which: str) -> tf.Tensor:
        if self.action == "raise":
            return _both_ways(
                x,
                lambda tensor: _asserted(tensor, f"layer '{self.name}'{which}: {FORWARD}"),
                lambda tensor: _asserted(tensor, f"layer '{self.name}'{which}: {BACKWARD}"),
            )
        resource = private_graph_apis.held_here(_keras.variables.tf_variable(self.backward_counts))
        return _both_ways(
            x,
            lambda tensor: _counted(tensor, self.forward_counts),
            lambda tensor: _counted(tensor, self.backward_counts, resource),
        )

    def report(self) -> str:
        """Returns a line for each pass, forward and backward, with non-finite elements.

        Returns:
            The lines. "" if all elements were finite. Always "" with `action="raise"`.
        """
        lines = []
        for label, variable in zip((FORWARD, BACKWARD), self._counts(), strict=False):
            nan, positive, negative, size = _total(variable)
            summary = Summary(size, nan, positive, negative, 0, 0.0, 0.0)
            if summary.non_finite:
                lines.append(f"layer '{self.name}': {label} has {summary}")
        return "\n".join(lines)

    def reset(self) -> None:
        """Sets the counts to zero."""
        for variable in self._counts():
            _set(variable, np.zeros(4, "int64"))

    def _counts(self) -> list[keras.Variable]:
        return [self.forward_counts, self.backward_counts] if self.action == "count" else []

    def load_own_variables(self, store: Any) -> None:
        """Loads the counts; see Keras."""
        # The file of a model without this layer has no counts. They keep their values.
        for number, variable in enumerate(self._counts()):
            if str(number) in store:
                _set(variable, np.asarray(store[str(number)]))

    def save_own_variables(self, store: Any) -> None:
        """Saves the counts, summed over all replicas; see Keras."""
        for number, variable in enumerate(self._counts()):
            store[str(number)] = _total(variable)

    def unwrapped(self) -> keras.layers.Layer:
        """Returns a plain Keras layer that does the same: `Identity`."""
        plain = keras.layers.Identity(name=self.name, dtype=self.dtype_policy, autocast=False)
        plain.supports_masking = True
        return plain

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "action": self.action}


def _both_ways(x: tf.Tensor, forward: Check, backward: Check) -> tf.Tensor:
    @custom_gradient
    def tap(x: tf.Tensor) -> tuple[tf.Tensor, Check]:
        return tf.identity(x), backward

    checked = forward(x)
    if not loss_logits.known(x):
        return tap(checked)
    with tf.control_dependencies([checked]):
        return loss_logits.keep(x, tap, for_logits=True)


def _asserted(tensor: Any, label: str) -> Any:
    """Returns the tensor. Operations that use it wait until it has been checked."""

    def fail() -> tf.Tensor:
        tf.debugging.Assert(False, [label + " has " + _in_words(summarize(tensor))])
        return tf.constant(False)

    is_finite = tf.cond(all_finite([tensor]), lambda: tf.constant(True), fail)
    with tf.control_dependencies([is_finite]):
        return tf.nest.map_structure(tf.identity, tensor, expand_composites=True)


def _counted(tensor: Any, counts: keras.Variable, resource: tf.Tensor | None = None) -> Any:
    """Returns the tensor and counts its elements.

    Args:
        tensor: Tensor to count.
        counts: Variable to which the counts are added.
        resource: Resource of `counts`, inside a loop or a branch. Default None, outside of them.
    """
    summary = summarize(tensor)
    found = tf.stack([summary.nan, summary.positive_inf, summary.negative_inf, summary.size])
    if resource is None:
        _add(counts, found)
    else:
        tf.raw_ops.AssignAddVariableOp(resource=resource, value=found)
    return tensor


def _replicas(counts: keras.Variable) -> list[tf.Variable]:
    """Returns the variables in which the replicas count."""
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
    """Formats a summary as `Summary.__str__` does, also in graphs."""
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
