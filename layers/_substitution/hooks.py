"""Replaces the `call` of single layers, and restores it.

A hook is an attribute `call` of the layer object. The class of the layer does not change, and other
layers of the class are not affected. The hook holds links, one per parametrization. The link that
was added last is called first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import keras

from tfwd import _keras


class Hook:
    """The `call` of a layer with at least one link.

    Args:
        layer: Layer that is hooked.

    Attributes:
        links: Functions `(function, args, kwargs) -> outputs`. A link calls `function`, which is
            the link before it or the layer's own call.
    """

    # This attribute tells AutoGraph that there is nothing to convert.
    autograph_info__: ClassVar[dict[str, Any]] = {}

    def __init__(self, layer: keras.Layer) -> None:
        self.layer = layer
        self.links: list[Callable[..., Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = _keras.layers.own_call(self.layer)
        for link in self.links:
            function = functools.partial(link, function)
        return function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns the plain call of the copied layer: a copy is not parametrized."""
        copied = memo.get(id(self.layer), self.layer)
        return _keras.layers.bound_call(copied)

    def __reduce__(self) -> Any:
        return _keras.layers.bound_call, (self.layer,)


Hook.__call__.autograph_info__ = {}  # type: ignore[attr-defined]


def hook_of(layer: keras.Layer) -> Hook | None:
    """Returns the hook of a layer, or None."""
    found = vars(layer).get("call")
    return found if isinstance(found, Hook) else None


def add(layer: keras.Layer, link: Callable[..., Any]) -> None:
    """Adds a link to a layer's call."""
    hook = hook_of(layer)
    if hook is None:
        hook = Hook(layer)
        # Keras would track the attribute otherwise.
        object.__setattr__(layer, "call", hook)
    hook.links.append(link)


def remove(layer: keras.Layer, link: Callable[..., Any]) -> None:
    """Removes a link from a layer's call. Without links the layer is as it was before."""
    hook = hook_of(layer)
    if hook is None or link not in hook.links:
        return
    hook.links.remove(link)
    if not hook.links:
        object.__delattr__(layer, "call")


def is_only_link(layer: keras.Layer) -> bool:
    """Returns True if a layer's hook has a single link, so that it calls the layer's own call."""
    hook = hook_of(layer)
    return hook is not None and len(hook.links) == 1
