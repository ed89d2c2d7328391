"""The decay of one variable: w <- w - f*(w - w0), as exactly as its dtype allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfwd.dtypes import wide

# Where one compiled pass over memory gains more than the call of a compiled function costs.
_LARGE = 2**18


def decay(variable: tf.Variable, fraction: Any, start: tf.Tensor | None = None) -> Any:
    """w <- w - f*w, or w <- w - f*(w - w0), rounded to the variable's dtype once.

    Args:
        variable: any floating dtype.
        fraction: f, a scalar of dtype `wide(variable.dtype)`.
        start: w0, of the variable's shape and dtype; None for 0.

    Returns:
        The operation.
    """
    if wide(variable.dtype) == variable.dtype:
        away = variable if start is None else variable - start
        return variable.assign_sub(fraction * away)
    value = tf.cast(variable, wide(variable.dtype))
    away = value if start is None else value - tf.cast(start, value.dtype)
    return variable.assign(tf.cast(value - fraction * away, variable.dtype))


def decay_rows(
    variable: tf.Variable, rows: tf.Tensor, fraction: Any, start: tf.Tensor | None = None
) -> Any:
    """The same for some rows, each once however often it is named.

    Args:
        variable: of rank 1 at least.
        rows: int `[n]`, with repetitions or without.
        fraction, start: as for `decay`.

    Returns:
        The operation.
    """
    value = tf.cast(tf.gather(variable, rows), wide(variable.dtype))
    # Assigned and not subtracted: a row that is named twice gets the same value twice.
    away = value if start is None else value - tf.cast(tf.gather(start, rows), value.dtype)
    decayed = tf.cast(value - fraction * away, variable.dtype)
    return variable.scatter_update(tf.IndexedSlices(decayed, rows))


class FusedSteps:
    """Decay and step of a large variable in one compiled pass over memory.

    Plain SGD does so little with each number that a pass of its own for the decay would be felt:
    24 million weights cost 1.3 times the step that way, and 0.6 times this way. Other optimizers
    make so many passes that one more is less than Keras's own decay takes.
    """

    def __init__(self) -> None:
        self._functions: dict[int, Callable[..., None]] = {}

    def takes(self, optimizer: Any, gradient: Any, variable: tf.Variable) -> bool:
        """Whether the update of this variable is made here."""
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
        """`decay(variable, fraction, start)`, then `own(gradient, variable, rate)`."""
        if id(variable) not in self._functions:

            @tf.function(jit_compile=True, autograph=False)
            def both(
                gradient: tf.Tensor, rate: tf.Tensor, fraction: tf.Tensor, start: tf.Tensor | None
            ) -> None:
                decay(variable, fraction, start)
                own(gradient, variable, rate)

            self._functions[id(variable)] = both
        self._functions[id(variable)](gradient, tf.convert_to_tensor(rate), fraction, start)
