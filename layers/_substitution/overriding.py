"""Whether a layer overrides something of its Keras class."""

from __future__ import annotations

import functools
from typing import Any

import keras

from tfwd import _keras

# What a class or an object may have of its own and still compute what Keras's class computes.
_HARMLESS = frozenset(
    {
        "__abstractmethods__",
        "__annotations__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__init__",
        "__init_subclass__",
        "__module__",
        "__orig_bases__",
        "__qualname__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
        "build",
        "compute_mask",
        "compute_output_shape",
        "compute_output_spec",
        "from_config",
        "get_config",
        "quantize",
    }
)
# What others put in the place of Keras's methods for the whole process shows in these.
_CALLED = ("__call__", "call", "inner_loop")


@functools.cache
def _names(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    """What a class has: all names that count, and those among them that can be called."""
    names = frozenset(dir(kind)) - _HARMLESS
    return names, frozenset(name for name in names if callable(getattr(kind, name, None)))


def is_plain(layer: Any, kind: type[keras.layers.Layer], ours: bool = False) -> bool:
    """Whether a layer is one of a class of Keras, and a call of it computes what the class says.

    Args:
        layer: any layer.
        kind: the class.
        ours: whether what classes of tfwd's own override does not count, since one of them is
            asking.
    """
    plain = isinstance(layer, kind) and not _keras.layers.is_altered(layer)
    return plain and not _is_overridden(layer, kind, ours)


def _is_overridden(layer: Any, kind: type, ours: bool) -> bool:
    """Whether a layer has anything in the place of what Keras's class has: a method, a property.

    Subclasses that only add to it override nothing, whatever their constructors do.
    """
    names, methods = _names(kind)
    for cls in type(layer).__mro__:
        if cls is kind:
            break
        if not (ours and cls.__module__.startswith("tfwd.")) and not names.isdisjoint(vars(cls)):
            return True
    if not methods.isdisjoint(vars(layer)):
        return True
    called = (getattr(kind, name, None) for name in _CALLED)
    return any(f is not None and not f.__module__.startswith("keras.") for f in called)
