"""Runs a layer on other values of its variables.

`call` runs a function that reads Keras variables, such as a layer's call. It replaces chosen
variables by tensors. Nothing is assigned and no attribute is swapped, so other readers of the
variables are not affected. With `capture=True` it is a pure function: it returns the layer's
updates (statistics, states, seeds) and does not make them. A computation that runs again in
backward must be a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras


class Result(NamedTuple):
    """The result of a substituted call.

    Attributes:
        outputs: Result of the function.
        updates: Pairs of a variable and the value that the call assigned to it (only if captured).
        losses: Scalar losses that layers added.
        escaped: Variables that were updated inside a loop or a branch. Their values are not known
            outside (only if captured).
        read: dict `id -> variable` of the Keras variables that the call read.
    """

    outputs: Any
    updates: list[tuple[keras.Variable, tf.Tensor]]
    losses: list[tf.Tensor]
    escaped: list[keras.Variable]
    read: dict[int, keras.Variable]


def call(
    function: Callable[[], Any],
    values: Sequence[tuple[keras.Variable, tf.Tensor]],
    capture: bool = False,
) -> Result:
    """Calls `function` with the given tensors in place of the given variables.

    Args:
        function: Function without arguments. For each Keras variable that it reads, directly or
            through layers, `values` is searched first.
        values: Pairs of a variable and a tensor of its shape and dtype. Autocast applies to the
            tensor as it would to the variable.
        capture: bool. Returns updates instead of making them. Default False.

    Returns:
        A `Result`.

    Example:
        >>> dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        >>> x = tf.ones([1, 3])
        >>> dense(x).numpy().item()
        3.0
        >>> call(lambda: dense(x), [(dense.kernel, tf.zeros([3, 1]))]).outputs.numpy().item()
        0.0
        >>> dense(x).numpy().item()
        3.0
    """
    with _keras.substitution.Substitution(list(values), capture) as scope:
        # Variables among the outputs are read here. After the scope they have their own values.
        outputs = tf.nest.map_structure(_read, function())
    updates = list(scope.updates.values())
    return Result(outputs, updates, list(scope.losses), scope.inner_updates, scope.read)


def _read(output: Any) -> Any:
    return tf.convert_to_tensor(output) if _keras.variables.is_variable(output) else output


def assign(updates: Sequence[tuple[keras.Variable, tf.Tensor]]) -> None:
    """Makes updates that were captured."""
    for variable, value in updates:
        _keras.variables.assign(variable, value)
