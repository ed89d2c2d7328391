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
        cls: Class of the second layer. Default None, for the class of the first.
        leave_out: Names of attributes that the second layer must not have. Default none.
        replace: Function from an attribute's value to the second layer's value. Default identity.
        changed: Ids of weights that the second layer need not have, because `replace` gives it
            other ones. Default none.
        is_own: Function that returns True for a name of an attribute that a layer's constructor
            makes for the layer itself. A copy must not take it from another layer.
        begin: Function of the second layer and the first. It is called before any attribute is set.

    Raises:
        ValueError: If the second layer would not have the weights of the first.
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
    had, has = ({id(weight) for weight in each.weights} for each in (layer, copy))
    if not had - changed <= has or (not changed and len(had) < len(has)):
        raise ValueError(
            f"layer '{layer.name}' of type {type(layer).__name__} contains layers that Keras does "
            "not track, so it cannot be copied: assign each inner layer to an attribute"
        )
    return copy
