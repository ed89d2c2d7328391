"""The decay of one variable: w <- w - f*(w - w0), as exactly as its dtype allows.

`FirstUpdates` and `NamedRows` select the variables and the rows that a step decays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd._keras import wrapped_optimizers
from tfwd.dtypes import wide

# A variable with at least this many entries gets one compiled pass over memory. The pass then saves
# more time than its call costs.
_LARGE = 2**18


def decay(variable: tf.Variable, fraction: Any, start: tf.Tensor | None = None) -> Any:
    """Computes w <- w - f*w, or w <- w - f*(w - w0), with one rounding to the variable's dtype.

    Args:
        variable: Variable of any floating dtype.
        fraction: The factor f, a scalar of dtype `wide(variable.dtype)`.
        start: w0, of the variable's shape and dtype. Default None, for 0.

    Returns:
        The operation.
    """
    if wide(variable.dtype) == variable.dtype:
        difference = variable if start is None else variable - start
        return variable.assign_sub(fraction * difference)
    value = tf.cast(variable, wide(variable.dtype))
    difference = value if start is None else value - tf.cast(start, value.dtype)
    return variable.assign(tf.cast(value - fraction * difference, variable.dtype))


def decay_rows(
    variable: tf.Variable, rows: tf.Tensor, fraction: Any, start: tf.Tensor | None = None
) -> Any:
    """Decays some rows of a variable. A row whose index is repeated is decayed once.

    Args:
        variable: Variable of rank 1 or more.
        rows: int `[n]`. Indices, with or without repetitions.
        fraction, start: As in `decay`.

    Returns:
        The operation.
    """
    value = tf.cast(tf.gather(variable, rows), wide(variable.dtype))
    # Assign, do not subtract: a row whose index is repeated gets the same value twice.
    difference = value if start is None else value - tf.cast(tf.gather(start, rows), value.dtype)
    decayed = tf.cast(value - fraction * difference, variable.dtype)
    return variable.scatter_update(tf.IndexedSlices(decayed, rows))


class FusedSteps:
    """Decay and step of a large variable in one compiled pass over memory.

    Plain SGD does little work per number, so a separate pass for the decay is expensive. With 24
    million weights it costs 1.3 times the step, and the fused pass costs 0.6 times the step. Other
    optimizers make many passes. One more pass costs less than Keras's own decay.
    """

    def __init__(self) -> None:
        self._functions: dict[int, Callable[..., None]] = {}

    def supports(self, optimizer: Any, gradient: Any, variable: tf.Variable) -> bool:
        """Returns True if the fused pass makes the update of this variable."""
        return (
            type(optimizer) is keras.optimizers.SGD
            and isinstance(gradient, tf.Tensor)
            and variable.shape.num_elements() >= _LARGE
            and variable.dtype == wide(variable.dtype)
            and not tf.distribute.has_strategy()
        )

    def __call__(
        self,
        own: Callable[..., None],
        gradient: tf.Tensor,
        variable: tf.Variable,
        rate: Any,
        fraction: tf.Tensor,
        start: tf.Tensor | None = None,
    ) -> None:
        """Runs `decay(variable, fraction, start)`, then `own(gradient, variable, rate)`."""
        if id(variable) not in self._functions:

            @tf.function(jit_compile=True, autograph=False)
            def both(
                gradient: tf.Tensor, rate: tf.Tensor, fraction: tf.Tensor, start: tf.Tensor | None
            ) -> None:
                decay(variable, fraction, start)
                own(gradient, variable, rate)

            self._functions[id(variable)] = both
        self._functions[id(variable)](gradient, tf.convert_to_tensor(rate), fraction, start)


class NamedRows:
    """The rows of a table that a step's gradient has, even if clipping made the gradient dense."""

    def __init__(self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        self._key = lambda variable: wrapped_optimizers.key(optimizer, variable)
        self._indices = {
            self._key(variable): gradient.indices
            for gradient, variable in zip(grads, variables, strict=True)
            if isinstance(gradient, tf.IndexedSlices)
        }

    def __call__(self, leaf: Any, gradient: Any, variable: tf.Variable) -> tf.Tensor | None:
        if isinstance(gradient, tf.IndexedSlices):
            return gradient.indices
        # The step's own gradient does not have all rows if the gradient was accumulated, or summed
        # over several replicas. The rows are then unknown.
        several = tf.distribute.get_strategy().num_replicas_in_sync > 1
        if wrapped_optimizers.accumulates(leaf) or several:
            return None
        return self._indices.get(self._key(variable))


class FirstUpdates:
    """Detector of the first update of each variable in a step.

    A tied variable that is in the list twice gets two updates, and is decayed once.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self._key = lambda variable: wrapped_optimizers.key(optimizer, variable)
        counts = Counter(map(self._key, variables))
        self._repeated = {key for key, count in counts.items() if count > 1}
        self._seen: set[int] = set()

    def __call__(self, variable: tf.Variable) -> bool:
        if self._key(variable) not in self._repeated:
            return True
        is_seen = id(variable) in self._seen
        self._seen.add(id(variable))
        return not is_seen
