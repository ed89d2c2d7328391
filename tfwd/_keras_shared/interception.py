"""Intercepts calls of layers, for the present thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tfwd._keras_shared.patching import Patch, patched

# handler(owner class, layer, its own call, args, kwargs)
Handler = Callable[[type, Any, Callable[..., Any], tuple, dict[str, Any]], Any]

_here = threading.local()


def calls_of(cls: type) -> type:
    """The class in which the `call` of a class is defined."""
    return next(c for c in cls.__mro__ if "call" in vars(c))


def present_handler() -> Handler | None:
    """The handler of this thread, if there is one."""
    return getattr(_here, "handler", None)


def ask(cls: type, layer: Any, own: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """A call of a layer, by the handler if there is one.

    Args:
        cls: the class whose `call` it is.
        layer: the layer.
        own: its own call.
        args, kwargs: the call's arguments.
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
    """Within the body, on this thread, a `call` that one of the classes defines goes to `handler`.

    Args:
        classes: classes that define `call`; others are ignored.
        handler: called in place of `call`; it has the original to go on with.
        asking: from a class and its `call` to one that asks, as `ask` does.
        others: what else has to be replaced meanwhile.
    """

    def patch(cls: type) -> Patch:
        return cls, "call", lambda original: asking(cls, original)

    wanted = [patch(cls) for cls in dict.fromkeys(classes) if "call" in vars(cls)]
    with patched([*wanted, *others]), _handled(handler):
        yield


def not_intercepted() -> contextlib.AbstractContextManager[None]:
    """Within the body, on this thread, nothing is intercepted."""
    return _handled(None)
