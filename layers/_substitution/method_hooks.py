"""Replaces methods of single layers, and restores them.

A hooked layer has its own attribute `call`. The class of the layer does not change, and other
layers of the class are not affected. The hook holds links, one per parametrization. The link that
was added last is called first. A hooked model also has its own `train_step`. A hooked layer rejects
quantization.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

import keras

from tfwd import _keras
from tfwd.layers._substitution import caller_detection

# A link is called with the link before it or the layer's own call, and with the arguments.
Link = Any

_NAME = "_tfwd_hook"


class Hook:
    """The links in the call of one layer. A copy of the layer has a hook without links.

    Attributes:
        links: The links. The last link is called first.
        replaced: The attributes that the layer itself had under the replaced names, such as a
            `call` of its own, or None.
        has_warned: True if the user was warned that a training step makes no training call.
    """

    def __init__(self, replaced: dict[str, Any] | None = None) -> None:
        self.links: list[Link] = []
        self.replaced: dict[str, Any] = {} if replaced is None else replaced
        self.has_warned = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(copy.deepcopy(self.replaced, memo))

    def __reduce__(self) -> Any:
        return Hook, (self.replaced,)


def hook_of(layer: keras.Layer) -> Hook | None:
    """Returns the hook of a layer, or None."""
    return vars(layer).get(_NAME)


def _bound(layer: keras.Layer, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of a layer with the signature of the method that it replaces."""
    replaced: Any = function
    replaced.autograph_info__ = {}  # tells AutoGraph not to convert it
    replaced.is_hook_of_tfwd = True
    own = vars(layer).get(name)
    if own is None:
        signature = inspect.signature(getattr(type(layer), name))
    else:
        signature = inspect.signature(own)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = signature.replace(parameters=[first, *signature.parameters.values()])
    replaced.__signature__ = signature
    return types.MethodType(replaced, layer)


def _call() -> Callable[..., Any]:
    def call(self: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        hook = hook_of(self) or Hook()
        function = _keras.layer_calls.own_call(self, hook.replaced.get("call"))
        for link in hook.links:
            function = functools.partial(link, function)
        return function(*args, **kwargs)

    return call


def _train_step() -> Callable[..., Any]:
    def train_step(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        hook = hook_of(self) or Hook()
        own = hook.replaced.get("train_step") or types.MethodType(type(self).train_step, self)
        with caller_detection.training_step() as step:
            result = own(*args, **kwargs)
        if hook.links and not step.has_trained and not hook.has_warned:
            hook.has_warned = True
            warnings.warn(
                f"the train_step of model '{self.name}' makes no training call of a parametrized "
                "layer, so it trains the raw weights: pass training=True to the layers that it "
                "calls. (training=False, also as the default of an argument, means evaluation.)",
                stacklevel=2,
            )
        return result

    return train_step


def _quantize(hint: str) -> Callable[..., Any]:
    def quantize(self: keras.Layer, *args: Any, **kwargs: Any) -> None:
        # A model's `quantize` turns it into a warning.
        raise NotImplementedError(f"layer '{self.name}' is parametrized in place: {hint}")

    return quantize


def add(layer: keras.Layer, link: Link, unquantizable: str = "") -> None:
    """Adds a link to a layer's call.

    Args:
        layer: Layer.
        link: Link.
        unquantizable: str. The reason why the layer cannot be quantized from now on. Default "".
    """
    hook = hook_of(layer)
    if hook is None:
        hook = Hook()
        # Keras would track the attributes otherwise.
        object.__setattr__(layer, _NAME, hook)
        _replace(layer, hook, "call", _call())
        if isinstance(layer, keras.Model):
            _replace(layer, hook, "train_step", _train_step())
    if unquantizable and "quantize" not in hook.replaced and hasattr(layer, "quantize"):
        _replace(layer, hook, "quantize", _quantize(unquantizable))
    hook.links.append(link)


def replace(layer: keras.Layer, link: Link, other: Link) -> None:
    """Puts another link at the position of a link."""
    hook = hook_of(layer)
    assert hook is not None
    hook.links[hook.links.index(link)] = other


def _replace(layer: keras.Layer, hook: Hook, name: str, function: Callable[..., Any]) -> None:
    hook.replaced[name] = vars(layer).get(name)
    object.__setattr__(layer, name, _bound(layer, name, function))


def remove(layer: keras.Layer, link: Link) -> None:
    """Removes a link from a layer's call. Without links the layer is as it was before."""
    hook = hook_of(layer)
    if hook is None or link not in hook.links:
        return
    hook.links.remove(link)
    if hook.links or not is_hooked(layer):  # other code may have replaced `call` since
        return
    for name, own in hook.replaced.items():
        object.__delattr__(layer, name)
        if own is not None:
            object.__setattr__(layer, name, own)
    object.__delattr__(layer, _NAME)


def replaced_call(layer: keras.Layer) -> Callable[..., Any] | None:
    """Returns the attribute `call` that a hooked layer had before, or None."""
    hook = hook_of(layer)
    return None if hook is None else hook.replaced.get("call")


def is_hooked(layer: keras.Layer) -> bool:
    """Returns True if a layer's attribute `call` belongs to the hook."""
    is_ours = getattr(vars(layer).get("call"), "is_hook_of_tfwd", False)
    return hook_of(layer) is not None and is_ours


def links_in(layer: keras.Layer) -> list[Link]:
    """Returns the links of a layer and of the layers in it."""
    found = map(hook_of, _keras.layers.all_layers(layer))
    return [link for hook in found if hook is not None for link in hook.links]


def is_first_link(layer: keras.Layer, link: Link) -> bool:
    """Returns True if a link calls the layer's own call, not another link."""
    hook = hook_of(layer)
    return hook is not None and hook.links[:1] == [link]
