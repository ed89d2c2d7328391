"""Intercepts calls of layers on the present thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tfwd._keras_shared.own_code import defining_class
from tfwd._keras_shared.patching import Patch, patched

# A handler takes the class, the layer, its own call, args and kwargs.
Handler = Callable[[type, Any, Callable[..., Any], tuple, dict[str, Any]], Any]

_here = threading.local()


def calls_of(cls: type) -> type:
    """Returns the class that defines the `call` of a class."""
    return defining_class(cls, "call")


def present_handler() -> Handler | None:
    """Returns the handler of this thread, or None."""
    return getattr(_here, "handler", None)


def ask(cls: type, layer: Any, own: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Calls a layer through the handler of this thread, if there is one.

    Args:
        cls: Class that defines the `call`.
        layer: Layer.
        own: The layer's own call.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    handler = present_handler()
    return own(*args, **kwargs) if handler is None else handler(cls, layer, own, args, kwargs)


@contextlib.contextmanager
def _handled(handler: Handler | None) -> Iterator[None]:
    before = present_handler()
    _here.handler = handler
    try:
        yield
    finally:
        _here.handler = before


@contextlib.contextmanager
def intercepted(
    classes: Iterable[type],
    handler: Handler,
    asking: Callable[[type, Any], Any],
    others: Iterable[Patch] = (),
) -> Iterator[None]:
    """Sends each `call` that one of the classes defines to `handler`, in the body, on this thread.

    Args:
        classes: Classes. Those that do not define `call` are ignored.
        handler: Function that is called in place of `call`. It gets the original.
        asking: Function from a class and its `call` to a `call` that uses `ask`.
        others: Other patches for the same time. Default none.
    """

    def patch(cls: type) -> Patch:
        return cls, "call", lambda original: asking(cls, original)

    wanted = [patch(cls) for cls in dict.fromkeys(classes) if "call" in vars(cls)]
    with patched([*wanted, *others]), _handled(handler):
        yield


def not_intercepted() -> contextlib.AbstractContextManager[None]:
    """Disables the interception in the body, on this thread."""
    return _handled(None)


def named_after(
    args: tuple, kwargs: dict[str, Any], names: list[str]
) -> tuple[tuple, dict[str, Any]]:
    """Passes positional arguments from `training` on by name.

    Args:
        args: Positional arguments of a call.
        kwargs: Keyword arguments of the call.
        names: Names of the call's parameters, in their order.
    """
    place = names.index("training") if "training" in names else len(args)
    return args[:place], {**dict(zip(names[place:], args[place:], strict=False)), **kwargs}
