"""Whether a layer is Keras's own all the way down, so that its call is known to be a function.

Only such a layer is run a second time in backward. Whatever a user wrote may draw from a generator
of its own, count its calls, or change in between, and nothing shows that to be so.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    return all(_is_known(x) for layer in _keras.all_layers(owner) for x in _parts(layer))


def _parts(layer: keras.Layer) -> Iterable[Any]:
    """The layer, what is called when it is called, and what it holds that can be called."""
    yield layer
    yield from (getattr(type(layer), name) for name in _CALLED)
    for value in vars(layer).values():
        if isinstance(value, dict):
            value = list(value.values())
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if callable(item):
                yield item


def _is_known(value: Any) -> bool:
    if isinstance(value, tf.types.experimental.PolymorphicFunction):
        return False
    module = str(getattr(value, "__module__", None) or type(value).__module__)
    return module.split(".")[0] in _KNOWN and not module.endswith(_CALLING)
