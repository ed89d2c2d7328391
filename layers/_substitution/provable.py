"""Detects layers with only Keras's own code, whose call is a pure function.

Only such a layer runs a second time in backward. Custom code may draw from its own generator, count
its calls, or change in between. tfwd cannot prove that custom code is repeatable.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers._substitution import hooks

_KNOWN = {"builtins", "keras", "tensorflow", "tf_keras", "tfwd"}
# Modules of operations in a functional model that call a function which is one of their arguments.
_CALLING = (".tf_op_layer", ".ops.core")
_CALLED = ("__call__", "call")


def is_keras_own(owner: keras.Layer) -> bool:
    """Returns True if a layer and all layers in it contain no custom code."""
    for layer in _keras.layers.all_layers(owner):
        called = [layer, *[getattr(type(layer), name) for name in _CALLED]]
        if (replaced := hooks.replaced_call(layer)) is not None:
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
_NAMES = {
    "_name",  # Keras 2's, like the next one
    "_name_scope_on_declaration",
    "_parent_path",  # Keras 3's, like the next one
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
        The key, or None if the layer contains custom code, or several parametrizations in place,
        of which one call runs some.
    """
    added = {id(link.in_place) for link in hooks.links_in(owner)}
    if len(added) > 1 or not is_keras_own(owner):
        return None
    return tuple(_signature(layer) for layer in _keras.layers.all_layers(owner))


def _signature(layer: keras.Layer) -> tuple:
    values = ((name, _value(value)) for name, value in vars(layer).items() if name not in _NAMES)
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
