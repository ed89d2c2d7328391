"""Copies a layer on the same variables. Both versions of Keras share this code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


def share(
    layer: Any,
    cls: type | None = None,
    leave_out: frozenset[str] = frozenset(),
    replace: Callable[[Any], Any] = lambda value: value,
    changed: frozenset[int] = frozenset(),
    *,
    is_own: Callable[[str], bool],
    begin: Callable[[Any, Any], None] = lambda copy, layer: None,
) -> Any:
    """Returns a second layer on the same variables and sublayers as the first.

    Args:
        layer: Layer. It is not changed.
        cls: Class of the second layer. Default None, for the class of the first layer.
        leave_out: Names of attributes that the second layer must not have. Default none.
        replace: Function from an attribute's value to the second layer's value. Default identity.
        changed: Ids of weights that the second layer may lack, because `replace` gives it other
            weights. Default none.
        is_own: Function that returns True for the name of an attribute that each layer's
            constructor creates. A copy must not take such an attribute from another layer.
        begin: Function that gets the second layer and the first layer, before any attribute is set.
            Default: does nothing.

    Raises:
        ValueError: If the second layer would not have the weights of the first layer.
    """
    kind: Any = cls or type(layer)
    copy = kind.__new__(kind)
    base = keras.Model if issubclass(kind, keras.Model) else keras.layers.Layer
    base.__init__(copy, name=layer.name, dtype=layer.dtype_policy)
    begin(copy, layer)
    for name, attribute in vars(layer).items():
        if not is_own(name) and name not in leave_out:
            setattr(copy, name, replace(attribute))
    # The order may differ: an `EinsumDense` lists its kernel before its bias.
    old, new = ({id(weight) for weight in each.weights} for each in (layer, copy))
    if not old - changed <= new or (not changed and len(old) < len(new)):
        raise ValueError(
            f"layer '{layer.name}' of type {type(layer).__name__} contains layers that Keras does "
            "not track, so it cannot be copied: assign each inner layer to an attribute"
        )
    return copy
