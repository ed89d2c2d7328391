"""Copies a layer on the same variables: what is alike on both Kerases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


def share(
    layer: Any,
    cls: type | None = None,
    leave_out: frozenset[str] = frozenset(),
    replace: Callable[[Any], Any] = lambda value: value,
    *,
    is_own: Callable[[str], bool],
    begin: Callable[[Any, Any], None] = lambda copy, layer: None,
) -> Any:
    """A second layer on the same variables and sublayers as the first.

    Args:
        layer: the layer; it is not changed.
        cls: the class of the second layer, by default that of the first.
        leave_out: attributes that the second one shall not have.
        replace: called with each attribute; what it returns is the second layer's.
        is_own: whether an attribute of a name is what a layer's constructor makes for the layer
            itself, and a copy must not take from another.
        begin: called with the second layer and the first before any attribute is set.

    Raises:
        ValueError: if the second layer does not come out with the weights of the first.
    """
    kind: Any = cls or type(layer)
    copy = kind.__new__(kind)
    base = keras.Model if issubclass(kind, keras.Model) else keras.layers.Layer
    base.__init__(copy, name=layer.name, dtype=layer.dtype_policy)
    begin(copy, layer)
    for name, attribute in vars(layer).items():
        if not is_own(name) and name not in leave_out:
            setattr(copy, name, replace(attribute))
    # The order may be another one, as an `EinsumDense` lists its kernel before its bias.
    if sorted(map(id, copy.weights)) != sorted(map(id, layer.weights)):
        raise ValueError(
            f"layer '{layer.name}' of type {type(layer).__name__} holds layers where Keras does "
            "not see them, so that it cannot be taken apart"
        )
    return copy
