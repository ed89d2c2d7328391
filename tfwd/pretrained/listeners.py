"""Objects that are told when tfwd gives variables new weights, as references of Mixout are."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol


class Listener(Protocol):
    """Hears of weights that were loaded or set."""

    def weights_were_set(self, ids: set[int]) -> None:
        """Hears the ids of the variables."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def add(listener: Listener) -> None:
    """Has an object be told from now on, as long as it lives."""
    _listeners.add(listener)


def tell(variables: Iterable[Any]) -> None:
    """Tells all of them which variables have new weights."""
    ids = set(map(id, variables))
    for listener in list(_listeners):
        listener.weights_were_set(ids)
