"""Keeps the logits of a softmax or sigmoid, if an identity replaces its output.

Keras computes a cross-entropy from the logits. From a probability that is rounded to 0, it would
compute a wrong loss and a gradient of 0. Its losses look for the logits at an attribute of the
tensor or, in a graph, at its operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_ATTRIBUTE = "_keras_logits"
# By their types, the operations whose inputs Keras takes.
_OPERATIONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "Softmax": lambda logits: tf.raw_ops.Softmax(logits=logits),
    "Sigmoid": lambda logits: tf.raw_ops.Sigmoid(x=logits),
}


def known(value: tf.Tensor) -> bool:
    """Returns True if Keras finds the logits of a tensor."""
    return hasattr(value, _ATTRIBUTE) or _operation(value) is not None


def keep(
    value: tf.Tensor, identity: Callable[[tf.Tensor], tf.Tensor], for_logits: bool = False
) -> tf.Tensor:
    """Returns `identity(value)`, at which Keras finds the logits of the value.

    Args:
        value: The tensor.
        identity: Function that returns a tensor's values in a new tensor.
        for_logits: bool. Applies the function to the logits too. Default False.
    """
    logits, operation = getattr(value, _ATTRIBUTE, None), _operation(value)
    if logits is None and operation is not None:
        again = operation(identity(value.op.inputs[0]))
        again.set_shape(value.shape)
        return again
    result: Any = identity(value)
    if logits is not None:
        setattr(result, _ATTRIBUTE, identity(logits) if for_logits else logits)
    return result


def _operation(value: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor] | None:
    symbolic = getattr(value, "op", None)  # an eager tensor has no operation, also in a graph
    return None if symbolic is None else _OPERATIONS.get(symbolic.type)
