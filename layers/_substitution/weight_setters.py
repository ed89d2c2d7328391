"""Notices that `set_weights` or `load_weights` of any layer or model assigns to a variable.

Keras does not tell a layer that a model, or another layer with the same variables, sets its
weights. So single variables get an `assign` of their own, which looks at its callers. Other ways
to assign are not noticed: `variable.assign` in a program, updates of optimizers, and TensorFlow's
checkpoints. `fit` is ignored, because its callbacks set weights of the same training run.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from tfwd import _keras

_LISTENERS = "_tfwd_setter_listeners"
_PACKAGES = ("keras", "tfwd")
_METHODS = ("set_weights", "load_weights", "fit")
_local = threading.local()


class Setter(NamedTuple):
    """Call of `set_weights` or `load_weights` that is on the stack.

    Attributes:
        layer: The layer or model whose method was called.
        loads: True if weights are loaded from a file of Keras 3's format, `.weights.h5`. A layer
            can store other state in such a file.
    """

    layer: Any
    loads: bool


class Listener(Protocol):
    """Interface of an object that is told about assignments."""

    def variable_was_set(self, variable: Any, setter: Setter) -> None:
        """Receives the variable."""


def listen(variable: Any, listener: Listener) -> None:
    """Tells a listener, until it is deleted, when a setter has assigned to a variable."""
    variable = _keras.variables.original(variable)
    if _LISTENERS not in vars(variable):
        object.__setattr__(variable, _LISTENERS, _Listeners())
        object.__setattr__(variable, "assign", types.MethodType(assign, variable))
    vars(variable)[_LISTENERS].every.add(listener)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Marks a body in which all listeners already know about new weights."""
    before = are_told()
    _local.told = True
    try:
        yield
    finally:
        _local.told = before


def are_told() -> bool:
    """Returns True in the body of `told`."""
    return getattr(_local, "told", False)


class _Listeners:
    """The listeners of one variable. A copy of the variable has none."""

    def __init__(self) -> None:
        self.every: weakref.WeakSet[Any] = weakref.WeakSet()

    def __reduce__(self) -> Any:
        return _Listeners, ()


def assign(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Assigns as the variable's class does, and tells the listeners. It is the method `assign`.

    A bound method is copied with its variable, and a function would assign to the original.
    """
    result = type(self).assign(self, *args, **kwargs)
    listeners = list(vars(self)[_LISTENERS].every)
    if listeners and tf.executing_eagerly():
        setter = _present_setter()
        for listener in listeners if setter else ():
            listener.variable_was_set(self, setter)
    return result


def _present_setter() -> Setter | None:
    """Returns the outermost setter on the stack, or None if there is none or `fit` runs."""
    frame: Any = sys._getframe(2)
    found, is_legacy = None, False
    while frame is not None:
        name = frame.f_code.co_name
        if _package(frame) in _PACKAGES:
            is_legacy |= ".legacy" in frame.f_globals["__name__"]
            names = frame.f_locals if name in _METHODS else {}
            one = names.get("self", names.get("model"))
            if name == "fit" and isinstance(one, keras.Model):
                return None
            if name != "fit" and isinstance(one, keras.layers.Layer):
                found = Setter(one, name == "load_weights" and not is_legacy)
        frame = frame.f_back
    return found


def stack_level() -> int:
    """Returns the `stacklevel` of a warning of the caller, for the line that called Keras or tfwd.

    Keras may come from a line of TensorFlow, which reports errors.
    """
    frame: Any = sys._getframe(1)
    level = 1
    while frame.f_back is not None and _package(frame) in (*_PACKAGES, "tensorflow"):
        frame, level = frame.f_back, level + 1
    return level


def _package(frame: Any) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
