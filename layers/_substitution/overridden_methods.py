"""Checks whether a layer overrides something of its Keras class."""

from __future__ import annotations

import functools
from typing import Any

import keras

from tfwd import _keras
from tfwd.layers._substitution import hooks

# Names that a class or an object may define itself and still compute the same as Keras's class.
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
# Methods of Keras that other packages may replace for the whole process.
_CALLED = ("__call__", "call", "inner_loop")


@functools.cache
def _names(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the relevant names of a class, and the names among them that are callable."""
    names = frozenset(dir(kind)) - _HARMLESS
    return names, frozenset(name for name in names if callable(getattr(kind, name, None)))


def is_plain(layer: Any, kind: type[keras.layers.Layer], ours: bool = False) -> bool:
    """Returns True if a layer is of a Keras class, and a call computes the same as that class.

    Args:
        layer: Any layer.
        kind: Keras class.
        ours: bool. Ignores the overrides in classes of tfwd. Default False. A class of tfwd that
            asks about itself passes True.
    """
    plain = isinstance(layer, kind) and not _keras.layers.is_altered(layer)
    return plain and not _is_overridden(layer, kind, ours)


def _unbound(method: Any) -> Any:
    return getattr(method, "__func__", method)


def _is_overridden(layer: Any, kind: type, ours: bool) -> bool:
    """Returns True if a layer replaces a method or property of its Keras class.

    Subclasses that only add names override nothing, whatever their constructors do.
    """
    names, methods = _names(kind)
    for cls in type(layer).__mro__:
        if cls is kind:
            break
        if not (ours and cls.__module__.startswith("tfwd.")) and not names.isdisjoint(vars(cls)):
            return True
    own = {name: vars(layer)[name] for name in methods & vars(layer).keys()}
    if hooks.is_hooked(layer):
        own["call"] = hooks.replaced_call(layer) or getattr(kind, "call", None)
    # Keras 2 leaves the class's own method on a layer that it has saved.
    if any(_unbound(own[name]) is not getattr(kind, name) for name in own):
        return True
    called = (getattr(kind, name, None) for name in _CALLED)
    return any(f is not None and not _keras.is_of_keras(f) for f in called)
