"""Temporarily replaces methods of Keras's classes and objects, such as the calls of layers."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras

from tfwd._keras_shared.keras_own_code import defining_class

# A class, the name of an attribute, and a function from its old value to its new value.
Patch = tuple[Any, str, Callable[[Any], Any]]

_NOTHING = object()
_lock = threading.Lock()
_patched: dict[tuple[Any, str], tuple[int, Any]] = {}  # number of patches, and the old value


@contextlib.contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Replaces attributes of classes in the body. The last open body restores the attributes."""
    patches = list(patches)
    with _lock:
        for owner, name, make in patches:
            count, original = _patched.get((owner, name), (0, vars(owner).get(name, _NOTHING)))
            if not count:
                setattr(owner, name, make(getattr(owner, name)))
            _patched[owner, name] = count + 1, original
    try:
        yield
    finally:
        with _lock:
            for owner, name, _ in patches:
                count, original = _patched[owner, name]
                _patched[owner, name] = count - 1, original
                if count > 1:
                    continue
                del _patched[owner, name]
                if original is _NOTHING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


@contextlib.contextmanager
def swapped(
    optimizers: Sequence[Any],
    methods: Callable[[Any], dict[str, Callable[..., Any]]],
    purpose: str = "step",
) -> Iterator[None]:
    """Replaces methods of optimizers in the body.

    Bodies with different purposes may be nested, in the same order on each replica. If bodies with
    the same purpose are nested, only the outer body has an effect.

    Args:
        optimizers: Optimizers.
        methods: Function from an optimizer to its new methods by name. It is called when the first
            replica enters. Replicas enter one after the other. All replicas have entered when the
            first replica leaves.
        purpose: str. A word for the purpose. Default "step".
    """
    mark = f"_tfwd_intercepted_{purpose}"
    for optimizer in optimizers:
        depth, kept = vars(optimizer).get(mark, (0, None))
        if not depth:
            others = methods(optimizer)
            kept = {name: vars(optimizer).get(name, _NOTHING) for name in others}
            for name, method in others.items():
                # `object.__setattr__` avoids Keras's tracking of attributes.
                object.__setattr__(optimizer, name, method)
        object.__setattr__(optimizer, mark, (depth + 1, kept))
    try:
        yield
    finally:
        for optimizer in optimizers:
            depth, kept = getattr(optimizer, mark)
            if depth > 1:
                object.__setattr__(optimizer, mark, (depth - 1, kept))
                continue
            object.__delattr__(optimizer, mark)
            for name, method in kept.items():
                object.__delattr__(optimizer, name)
                if method is not _NOTHING:
                    object.__setattr__(optimizer, name, method)


# A handler takes the class, the layer, its own call, args and kwargs.
Handler = Callable[[type, Any, Callable[..., Any], tuple, dict[str, Any]], Any]

_here = threading.local()


def calls_of(cls: type) -> type:
    """Returns the class that defines the `call` of a class."""
    return defining_class(cls, "call")


def bound(original: Callable[..., Any], layer: Any) -> Callable[..., Any]:
    """Returns a class's `call`, bound to a layer.

    A `tf.function` in a class has its own traces for each object that it is bound to.
    """
    if hasattr(original, "__get__"):
        return original.__get__(layer, type(layer))
    return functools.partial(original, layer)


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
def _handled(handler: Handler) -> Iterator[None]:
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
        classes: Classes. A class that does not define `call` is ignored.
        handler: Function that is called in place of `call`. It gets the original `call`.
        asking: Function from a class and its `call` to a `call` that uses `ask`.
        others: Other patches that apply in the body. Default none.
    """

    def patch(cls: type) -> Patch:
        return cls, "call", lambda original: asking(cls, original)

    wanted = [patch(cls) for cls in dict.fromkeys(classes) if "call" in vars(cls)]
    with patched([*wanted, *others]), _handled(handler):
        yield


def named_after(
    args: tuple, kwargs: dict[str, Any], names: list[str]
) -> tuple[tuple, dict[str, Any]]:
    """Converts the positional argument `training`, and all after it, to keyword arguments.

    Args:
        args: Positional arguments of a call.
        kwargs: Keyword arguments of the call.
        names: Names of the call's parameters, in their order.
    """
    place = names.index("training") if "training" in names else len(args)
    return args[:place], {**dict(zip(names[place:], args[place:], strict=False)), **kwargs}


def computed_loss(
    model: keras.Model, changed: Callable[[Any, Any], Any]
) -> contextlib.AbstractContextManager[None]:
    """Replaces a model's loss by `changed(loss, predictions)` in the body."""

    def methods(model: Any) -> dict[str, Callable[..., Any]]:
        own = model.compute_loss

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            predictions = kwargs.get("y_pred", args[2] if len(args) > 2 else None)
            return changed(own(*args, **kwargs), predictions)

        return {"compute_loss": compute_loss}

    return swapped([model], methods, "loss")
