"""Reference-counted monkey-patching of classes' and optimizers' methods."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

# a class, the name of an attribute, and a function from what stood there to what shall
Patch = tuple[Any, str, Callable[[Any], Any]]

_NOTHING = object()
_lock = threading.Lock()
_patched: dict[tuple[Any, str], tuple[int, Any]] = {}  # how often, and what stood there


@contextlib.contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Within the body attributes of classes are others, until the last body that wants it ends."""
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
    """Within the body optimizers have other methods.

    Bodies of several purposes may be nested, in the same order on each replica. Of those of one
    purpose, the outer alone counts.

    Args:
        optimizers: the optimizers.
        methods: from an optimizer to its other methods by their names. It is called when the first
            replica enters: replicas enter one after the other, and all are in it when the first
            leaves.
        purpose: what they are for, a word.
    """
    mark = f"_tfwd_intercepted_{purpose}"
    for optimizer in optimizers:
        depth, kept = vars(optimizer).get(mark, (0, None))
        if not depth:
            others = methods(optimizer)
            kept = {name: vars(optimizer).get(name, _NOTHING) for name in others}
            for name, method in others.items():
                # Past Keras's tracking of attributes, which has no business with functions.
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
