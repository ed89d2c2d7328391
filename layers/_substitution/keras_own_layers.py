"""Checks whether the call of a layer is Keras's own code, and therefore a pure function.

Only a layer without custom code can run a second time in backward. Only such a layer shares the
analysis of its call with equal layers, or gets a faster implementation. Custom code may draw from
its own generator, count its calls, or change in between. tfwd cannot prove that custom code is
repeatable.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers._substitution import method_hooks

_KNOWN = {"builtins", "keras", "tensorflow", "tf_keras", "tfwd"}
# Modules of operations in functional models that call one of their arguments.
_CALLING = (".tf_op_layer", ".ops.core")
_CALLED = ("__call__", "call")


def is_keras_own(owner: keras.Layer) -> bool:
    """Returns True if a layer and all layers in it contain no custom code."""
    for layer in _keras.layers.all_layers(owner):
        called = [layer, *[getattr(type(layer), name) for name in _CALLED]]
        if (replaced := method_hooks.replaced_call(layer)) is not None:
            called.append(replaced)
        for value in vars(layer).values():
            if isinstance(value, dict):
                value = list(value.values())
            called += filter(callable, value if isinstance(value, (list, tuple)) else (value,))
        if not all(map(_is_known, called)):
            return False
    return True


def _is_known(value: Any) -> bool:
    if isinstance(value, tf.types.experimental.PolymorphicFunction):
        return False
    module = str(getattr(value, "__module__", None) or type(value).__module__)
    return module.split(".")[0] in _KNOWN and not module.endswith(_CALLING)


# Attributes that differ between layers which compute the same. If a new Keras adds such a name,
# each layer is analysed separately, which only costs time.
_IGNORED = {
    "_name",  # of Keras 2, like the next entry
    "_name_scope_on_declaration",
    "_parent_path",  # of Keras 3, like the next entry
    "_path",
    "name",
    "seed",
    "wrapper",
}
_PLAIN = (bool, int, float, str, bytes, type(None))


def signature(owner: keras.Layer) -> tuple | None:
    """Returns a hashable key that layers share if their calls do the same.

    The key contains the classes of the layer and of the layers in it, their numbers, strings and
    functions, and the ranks of their variables. It leaves out the names and values of variables. It
    also leaves out sizes: all integers above one are equal, because they do not change which code
    of a Keras layer runs.

    Returns:
        The key. None if the layer contains custom code, or several parametrizations in place,
        because a call may run only some of them.
    """
    added = {id(link.in_place) for link in method_hooks.links_in(owner)}
    if len(added) > 1 or not is_keras_own(owner):
        return None
    return tuple(_signature(layer) for layer in _keras.layers.all_layers(owner))


def _signature(layer: keras.Layer) -> tuple:
    values = ((name, _value(value)) for name, value in vars(layer).items() if name not in _IGNORED)
    return (
        type(layer),
        layer.trainable,
        str(layer.compute_dtype),
        tuple((str(v.dtype), len(v.shape)) for v in layer.variables),
        tuple(sorted((name, repr(value)) for name, value in values if value is not None)),
    )


def _value(value: Any) -> Any:
    """Describes a value by its type and contents. A function is described by its name."""
    if isinstance(value, _PLAIN):
        size = isinstance(value, int) and value > 1
        return type(value).__name__, 2 if size else value
    if isinstance(value, (list, tuple)):
        return [_value(x) for x in value]
    if isinstance(value, dict):
        return [(str(key), _value(x)) for key, x in value.items()]
    if callable(value) and not isinstance(value, keras.layers.Layer):
        return getattr(value, "__module__", ""), getattr(value, "__qualname__", type(value))
    return type(value)


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
_REPLACEABLE = ("__call__", "call", "inner_loop")


@functools.cache
def _relevant_names(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the relevant names of a class, and the names among them that are callable."""
    names = frozenset(dir(kind)) - _HARMLESS
    return names, frozenset(name for name in names if callable(getattr(kind, name, None)))


def is_plain(layer: Any, kind: type[keras.layers.Layer], ours: bool = False) -> bool:
    """Returns True if a layer is of a Keras class, and a call computes the same as that class.

    Args:
        layer: Any layer.
        kind: Keras class.
        ours: bool. Ignores the overrides in classes of tfwd. Default False. Classes of tfwd pass
            True for themselves.
    """
    plain = isinstance(layer, kind) and not _keras.layers.is_altered(layer)
    return plain and not _is_overridden(layer, kind, ours)


def _unbound(method: Any) -> Any:
    return getattr(method, "__func__", method)


def _is_overridden(layer: Any, kind: type, ours: bool) -> bool:
    """Returns True if a layer replaces a method or property of its Keras class.

    Subclasses that only add names override nothing, whatever their constructors do.
    """
    names, methods = _relevant_names(kind)
    for cls in type(layer).__mro__:
        if cls is kind:
            break
        if not (ours and cls.__module__.startswith("tfwd.")) and not names.isdisjoint(vars(cls)):
            return True
    own = {name: vars(layer)[name] for name in methods & vars(layer).keys()}
    if method_hooks.is_hooked(layer):
        own["call"] = method_hooks.replaced_call(layer) or getattr(kind, "call", None)
    # Keras 2 leaves the class's own method on a layer that it has saved.
    if any(_unbound(own[name]) is not getattr(kind, name) for name in own):
        return True
    called = (getattr(kind, name, None) for name in _REPLACEABLE)
    return any(f is not None and not _keras.is_of_keras(f) for f in called)
