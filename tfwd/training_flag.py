"""The training flag, and the only `tf.cond` of the library.

Keras passes `training` as a Python bool. Custom programs may pass a boolean tensor, so that one
traced function serves both training and evaluation. All code that depends on the flag uses `cond`,
which costs nothing for a Python bool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

T = TypeVar("T")


def standardize(training: Any) -> bool | tf.Tensor:
    """Returns the flag as a Python bool if its value is known, else as a boolean scalar tensor.

    Args:
        training: bool, int, NumPy bool, scalar tensor or variable. None means False, as in Keras.

    Returns:
        A bool, or a `tf.bool` tensor of shape `[]` if the value is not known yet.

    Raises:
        ValueError: If the flag is a tensor that is not a scalar.

    Example:
        >>> standardize(None), standardize(1), standardize(tf.constant(True))
        (False, True, True)
    """
    if training is None or isinstance(training, bool):
        return bool(training)
    if not (tf.is_tensor(training) or isinstance(training, tf.Variable)):
        return bool(training)
    flag = tf.convert_to_tensor(training)
    if flag.shape.rank not in (0, None):
        raise ValueError(
            "training must be a bool or a scalar boolean tensor, got a tensor of shape "
            f"{flag.shape}"
        )
    known = tf.get_static_value(flag)
    if known is not None:
        return bool(known)
    return tf.cast(flag, tf.bool)


def call_with_bool(training: bool | tf.Tensor, function: Callable[[bool], T]) -> T:
    """Returns `function(training)`, with a Python bool in each branch of `cond`."""
    return cond(training, lambda: function(True), lambda: function(False))


def cond(training: bool | tf.Tensor, if_training: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """Calls one function in training and the other function in evaluation.

    For a Python bool only the chosen function runs. For a tensor both functions are traced, as
    branches of a `tf.cond`. They must then return the same structure.

    Example:
        >>> cond(True, lambda: "dropped", lambda: "raw")
        'dropped'
    """
    if isinstance(training, bool):
        return if_training() if training else otherwise()
    return tf.cond(training, if_training, otherwise)
