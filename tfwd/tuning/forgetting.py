"""Giving back what the models of a trial have left in TensorFlow.

`tf.custom_gradient`, when it is traced in a graph, enters its gradient function into a global table
that nothing is ever removed from, and that function holds the layer it is of, and with it the whole
model. tfwd's recomputation is a custom gradient, as `tf.recompute_grad` is, so each trial of a
sweep would leave its weights and the optimizer's moments behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tensorflow.python.framework import ops

_PREFIX = "CustomGradient-"


@contextlib.contextmanager
def forgotten_gradients() -> Iterator[None]:
    """Removes, on leaving, the custom gradients that were entered inside.

    A function that was traced inside can still be called, and trains if it was traced with its
    gradient, as a training step is; a gradient of it can no longer be traced anew.

    Example:

    >>> import tensorflow as tf
    >>> @tf.custom_gradient
    ... def square(x):
    ...     return x * x, lambda upstream: 2 * x * upstream
    >>> @tf.function
    ... def slope(x):
    ...     with tf.GradientTape() as tape:
    ...         tape.watch(x)
    ...         y = square(x)
    ...     return tape.gradient(y, x)
    >>> before = len(registered())
    >>> with forgotten_gradients():
    ...     print(float(slope(tf.constant(3.0))), len(registered()) - before)
    6.0 1
    >>> float(slope(tf.constant(4.0))), len(registered()) - before
    (8.0, 0)
    """
    before = registered()
    try:
        yield
    finally:
        for name in registered() - before:
            ops.gradient_registry._registry.pop(name, None)


def registered() -> set[str]:
    """The names of all custom gradients that TensorFlow holds."""
    return {name for name in ops.gradient_registry.list() if name.startswith(_PREFIX)}
