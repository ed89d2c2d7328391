"""Reference-counted monkey-patching of classes' and optimizers' methods."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

# A class, the name of an attribute, and a function from its old value to its new value.
Patch = tuple[Any, str, Callable[[Any], Any]]

_NOTHING = object()
_lock = threading.Lock()
_patched: dict[tuple[Any, str], tuple[int, Any]] = {}  # number of patches, and the old value


@contextlib.contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Replaces attributes of classes in the body. The last of several bodies restores them."""
    patches = list(patches)
    with _lock:
        for owner, name, make in patches:
            count, stood = _patched.get((owner, name), (0, vars(owner).get(name, _NOTHING)))
            if not count:
                setattr(owner, name, make(getattr(owner, name)))
            _patched[owner, name] = count + 1, stood
    try:
        yield
    finally:
        with _lock:
            for owner, name, _ in patches:
                count, stood = _patched[owner, name]
                _patched[owner, name] = count - 1, stood
                if count > 1:
                    continue
                del _patched[owner, name]
                if stood is _NOTHING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, stood)


@contextlib.contextmanager
def swapped(
    optimizers: Sequence[Any],
    methods: Callable[[Any], dict[str, Callable[..., Any]]],
    purpose: str = "step",
) -> Iterator[None]:
    """Replaces methods of optimizers in the body.

    Bodies with different purposes may be nested, in the same order on each replica. Of nested
    bodies with one purpose, only the outer one has an effect.

    Args:
        optimizers: Optimizers.
        methods: Function from an optimizer to its new methods by name. It is called when the first
            replica enters. Replicas enter one after the other, and all have entered when the first
            one leaves.
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
