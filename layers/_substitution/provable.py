"""Whether a layer has only Keras's own code, so that its call is known to be a pure function.

Only such a layer is run a second time in backward. Whatever a user wrote may draw from a generator
of its own, count its calls, or change in between, and nothing shows that to be so.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras

_KNOWN = {"builtins", "keras", "tensorflow", "tf_keras", "tfwd"}
# Operations of a functional model that call a function which stands among their arguments.
_CALLING = (".tf_op_layer", ".ops.core")
_CALLED = ("__call__", "call")


def is_keras_own(owner: keras.Layer) -> bool:
    """Whether a layer, and all in it, have no method, function or object that a user wrote."""
    for layer in _keras.layers.all_layers(owner):
        called = [layer, *[getattr(type(layer), name) for name in _CALLED]]
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


# What layers that compute alike differ in. A name that a new Keras adds to these costs time only:
# each layer is then analysed by itself.
_NAMES = {
    "_name",  # Keras 2's, as is the next one
    "_name_scope_on_declaration",
    "_parent_path",  # Keras 3's, as is the next one
    "_path",
    "name",
    "seed",
    "wrapper",
}
_PLAIN = (bool, int, float, str, bytes, type(None))


def signature(owner: keras.Layer) -> tuple | None:
    """What all layers have in common that do the same in a call; None if nothing shows it.

    Hashable: the classes of the layer and of those in it, their numbers, texts and functions, and
    the ranks of their variables. Names and values of variables are left out. So are sizes: whole
    numbers above one are alike, since the code of Keras's layers takes no other turn for them.
    """
    if not is_keras_own(owner):
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
    """A number, a text, or such in lists and dicts, with its type; a function as where it is."""
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
