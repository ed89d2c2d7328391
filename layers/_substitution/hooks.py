"""Replaces the `call` of single layers, and restores it.

A hooked layer has an attribute `call` of its own. The class of the layer does not change, and other
layers of the class are not affected. The hook holds links, one per parametrization. The link that
was added last is called first. If the layer already had such an attribute, the hook keeps it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import keras

from tfwd import _keras

# A link is called with the link before it or the layer's own call, and with the arguments.
Link = Any

_NAME = "_tfwd_hook"


class Hook:
    """The links in the call of one layer. A copy of the layer has a hook without links.

    Args:
        replaced: The layer's attribute `call` before it was hooked. Default None, if the layer had
            only the `call` of its class.
    """

    def __init__(self, replaced: Callable[..., Any] | None = None) -> None:
        self.links: list[Link] = []
        self.replaced = replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(copy.deepcopy(self.replaced, memo))

    def __reduce__(self) -> Any:
        return Hook, (self.replaced,)


def _method(layer: keras.Layer) -> Callable[..., Any]:
    """Returns the `call` of a hooked layer: a bound method with the signature of its own `call`."""

    def call(self: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        hook = hook_of(self)
        function = _keras.layers.own_call(self, replaced_call(self))
        for link in () if hook is None else hook.links:
            function = functools.partial(link, function)
        return function(*args, **kwargs)

    call.autograph_info__ = {}  # type: ignore[attr-defined]  # tells AutoGraph not to convert it
    signature = inspect.signature(type(layer).call)
    if (replaced := replaced_call(layer)) is not None:
        own = inspect.signature(replaced)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = own.replace(parameters=[first, *own.parameters.values()])
    call.__signature__ = signature  # type: ignore[attr-defined]
    return types.MethodType(call, layer)


def hook_of(layer: keras.Layer) -> Hook | None:
    """Returns the hook of a layer, or None."""
    return vars(layer).get(_NAME)


def replaced_call(layer: keras.Layer) -> Callable[..., Any] | None:
    """Returns the attribute `call` that a hooked layer had before, or None."""
    hook = hook_of(layer)
    return None if hook is None else hook.replaced


def is_hooked(layer: keras.Layer) -> bool:
    """Returns True if a layer's attribute `call` is the hook's."""
    call = vars(layer).get("call")
    return hook_of(layer) is not None and getattr(call, "__module__", None) == __name__


def add(layer: keras.Layer, link: Link) -> None:
    """Adds a link to a layer's call."""
    hook = hook_of(layer)
    if hook is None:
        hook = Hook(vars(layer).get("call"))
        # Keras would track the attributes otherwise.
        object.__setattr__(layer, _NAME, hook)
        object.__setattr__(layer, "call", _method(layer))
    hook.links.append(link)


def remove(layer: keras.Layer, link: Link) -> None:
    """Removes a link from a layer's call. Without links the layer is as it was before."""
    hook = hook_of(layer)
    if hook is None or link not in hook.links:
        return
    hook.links.remove(link)
    if hook.links or not is_hooked(layer):  # other code may have replaced `call` since
        return
    object.__delattr__(layer, _NAME)
    if hook.replaced is None:
        object.__delattr__(layer, "call")
    else:
        object.__setattr__(layer, "call", hook.replaced)


def links_in(layer: keras.Layer) -> list[Link]:
    """Returns the links of a layer and of the layers in it."""
    found = map(hook_of, _keras.layers.all_layers(layer))
    return [link for hook in found if hook is not None for link in hook.links]


def is_first_link(layer: keras.Layer, link: Link) -> bool:
    """Returns True if a link is the one that calls the layer's own call."""
    hook = hook_of(layer)
    return hook is not None and hook.links[:1] == [link]
