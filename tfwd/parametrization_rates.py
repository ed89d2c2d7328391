"""Rates and standard deviations: numbers, variables or schedules.

A rate is a number, a variable, or a schedule, which is any callable of the training-call counter.
Known properties are checked when a layer is built. Other properties are checked when the rate is
read. The errors name the layer and the weight.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import numbers
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd._graph import private_graph_apis

# A float, a tensor, a variable, or a function of the training-call counter.
Scalar = Any

_where: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="")


@contextlib.contextmanager
def named_in_errors(where: str) -> Iterator[None]:
    """Makes errors in the body name a weight and its layer, if a value is read there."""
    token = _where.set(where)
    try:
        yield
    finally:
        _where.reset(token)


def as_float_if_known(value: Any) -> Any:
    """Returns a float for a scalar array or a tensor with a known value, else the value itself."""
    if isinstance(value, np.ndarray) or (tf.is_tensor(value) and not _is_variable(value)):
        known = tf.get_static_value(value) if tf.is_tensor(value) else value
        if known is not None and np.ndim(known) == 0 and np.issubdtype(known.dtype, np.floating):
            return float(known)
    return value


def is_number(value: Any) -> bool:
    """Returns True for a real number, but not for a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_variable(value: Any) -> bool:
    return isinstance(value, tf.Variable) or _keras.variables.is_variable(value)


def check(where: str, name: str, value: Any, below: float) -> None:
    """Checks the known properties of a rate. Other properties are checked when it is read.

    A schedule is called for two call numbers, twice for each number. It must return a real scalar,
    and the same scalar both times.

    Args:
        where: Beginning of the error message, which names the layer and the weight.
        name: Name of the argument.
        value: Rate or standard deviation.
        below: Upper limit of the value.

    Raises:
        ValueError: If the value is not a real scalar of at least 0 and less than `below`, or a
            function of the training-call counter to such scalars.
    """
    limit = "in [0, 1)" if below == 1.0 else "a finite number of at least 0"
    if is_number(value):  # first, since tests of other types are slow
        pass
    elif tf.is_tensor(value) or _is_variable(value):
        if fault := _fault(value):
            raise ValueError(f"{where}: {name} must be a scalar {limit}; got {fault}")
        if not _is_variable(value) or not tf.executing_eagerly():
            return
    elif callable(value):
        _try(where, name, value)
        return
    else:
        raise ValueError(
            f"{where}: {name} must be {limit}, a schedule or a variable; got {value!r}"
        )
    number = float(value)
    if not 0.0 <= number < below:  # False for NaN
        raise ValueError(f"{where}: {name} must be {limit}; got {number}")


def _fault(value: Any) -> str:
    """Returns the reason why a value is not a real scalar, or "" if none is known."""
    if not (tf.is_tensor(value) or _is_variable(value)):
        try:
            value = tf.convert_to_tensor(value)
        except (TypeError, ValueError):
            return f"{value!r} of type {type(value).__name__}"
    dtype = tf.as_dtype(value.dtype)
    if not (dtype.is_floating or dtype.is_integer):
        return f"a value of dtype {dtype.name}: {value!r}"
    rank = tf.TensorShape(value.shape).rank
    return f"a value of shape {tuple(value.shape)}: {value!r}" if rank else ""


def _try(where: str, name: str, schedule: Any) -> None:
    """Calls a schedule. Raises a ValueError if its results are not real scalars, or are random."""
    for call in (0, 1000):
        try:
            with tf.init_scope():  # inside a tf.function, a random schedule would draw only once
                number = tf.constant(call, tf.int64)
                values = [schedule(number), schedule(number)]
                fault = _fault(values[0])
                found = [] if fault else [float(value) for value in values]
        except Exception:
            return  # it may need objects that exist only when it is read; that read raises an error
        if fault:
            raise ValueError(
                f"{where}: {name} must be a schedule that returns a real scalar; for call {call} "
                f"it returned {fault}"
            )
        if found[0] != found[1] and not any(map(math.isnan, found)):
            raise ValueError(
                f"{where}: {name} must be a schedule that depends only on the number of the call; "
                f"for call {call} it returned {found[0]} and then {found[1]}, so "
                "backward would use another value than forward"
            )


def read(value: Scalar, call: tf.Tensor, below: float) -> Scalar:
    """Returns a float unchanged, and a variable or a schedule as a float32 scalar.

    Args:
        value: Rate or standard deviation.
        call: int64 scalar. Number of the training call.
        below: Upper limit of the value.

    XLA drops assertions. Under XLA, a value out of range becomes NaN, and the effective weight
    becomes NaN.

    Raises:
        ValueError: If a schedule does not return a real scalar.
        tf.errors.InvalidArgumentError: If the value is out of range, except under XLA.
    """
    if is_number(value):
        return value
    name = _where.get() or "a parametrized weight"
    if _keras.variables.is_variable(value):
        value = _keras.variables.value(value)
    elif callable(value) and not _is_variable(value):
        value = value(call)
        if _keras.variables.is_variable(value):
            value = _keras.variables.value(value)
    if fault := _fault(value):
        raise ValueError(f"{name}: a rate or deviation must be a real scalar; got {fault}")
    value = tf.ensure_shape(tf.cast(value, tf.float32), [])
    good = (value >= 0.0) & (value < below)
    if private_graph_apis.in_xla():  # XLA removes assertions. A rate of NaN makes every draw NaN.
        value = tf.where(good, value, math.nan)
    # `stop_gradient` is the last operation, which shows that the value needs no gradient.
    value = tf.stop_gradient(value)
    message = f"{name}: a rate or deviation must be at least 0 and below {below}; got"
    tf.debugging.Assert(good, [message, value])
    return value


def serialized(value: Scalar) -> Any:
    """Returns the value for a config: a number, or a schedule that Keras has serialized."""
    if _is_variable(value):
        return float(value)
    if is_number(value):
        return value
    return keras.saving.serialize_keras_object(value)
