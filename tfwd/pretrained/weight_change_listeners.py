"""Registry of objects that are notified when tfwd sets weights, such as references of Mixout."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol


class Listener(Protocol):
    """Interface of an object that is notified when weights are loaded or set."""

    def weights_were_set(self, ids: set[int]) -> None:
        """Receives the ids of the variables that were set."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def add(listener: Listener) -> None:
    """Registers a listener until it is deleted."""
    _listeners.add(listener)


def tell(variables: Iterable[Any]) -> None:
    """Notifies all listeners that variables were set."""
    ids = set(map(id, variables))
    for listener in list(_listeners):
        listener.weights_were_set(ids)
