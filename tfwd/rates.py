"""Rates and deviations: what one may be, how it is checked, and how it is read.

A rate is a number, a variable, or a schedule, which is any callable from the number of the training
call. What can be known of it is checked when a layer is built; the rest, with the names of the
layer and the weight, when it is read.
"""

from __future__ import annotations

import contextlib
import contextvars
import numbers
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras

# A float, a tensor, a variable, or a callable from the call's number: TensorFlow has no types.
Scalar = Any

_where: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="")


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Errors about values that are read inside the body name this weight and layer."""
    token = _where.set(where)
    try:
        yield
    finally:
        _where.reset(token)


def constant(value: Any) -> Any:
    """A float for a scalar array or a tensor whose value is known; anything else as it is."""
    if isinstance(value, np.ndarray) or (tf.is_tensor(value) and not _is_variable(value)):
        known = tf.get_static_value(value) if tf.is_tensor(value) else value
        if known is not None and np.ndim(known) == 0 and np.issubdtype(known.dtype, np.floating):
            return float(known)
    return value


def is_number(value: Any) -> bool:
    """Whether it is a real number, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_variable(value: Any) -> bool:
    return isinstance(value, tf.Variable) or _keras.is_variable(value)


def check(where: str, name: str, value: Any, below: float) -> None:
    """Checks what can be known now; schedules and tensors are checked when they are read.

    Raises:
        ValueError: that begins with `where`, unless the value is at least 0 and less than `below`.
    """
    if _is_variable(value):
        if not tf.executing_eagerly():
            return
    elif tf.is_tensor(value) or callable(value):
        return
    limit = "in [0, 1)" if below == 1.0 else "a finite number of at least 0"
    if not is_number(value) and not _is_variable(value):
        raise ValueError(
            f"{where}: {name} must be {limit}, a schedule or a variable; got {value!r}"
        )
    number = float(value)
    if not 0.0 <= number < below:  # False for NaN
        raise ValueError(f"{where}: {name} must be {limit}; got {number}")


def read(value: Scalar, call: tf.Tensor, below: float) -> Scalar:
    """A float as it is; a variable or a schedule as a float32 scalar."""
    if is_number(value):
        return value
    if _keras.is_variable(value):
        value = _keras.value(value)
    elif callable(value) and not _is_variable(value):
        value = value(call)
    value = tf.stop_gradient(tf.cast(value, tf.float32))
    name = _where.get() or "a parametrized weight"
    message = f"{name}: a rate or deviation must be at least 0 and below {below}; got"
    tf.debugging.Assert((value >= 0.0) & (value < below), [message, value])
    return value


def serialized(value: Scalar) -> Any:
    """What a config has for it: a number, or a schedule as Keras serializes it."""
    if _is_variable(value):
        return float(value)
    if is_number(value):
        return value
    return keras.saving.serialize_keras_object(value)
