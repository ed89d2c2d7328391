"""Registry of objects that are notified when tfwd sets variables, as references of Mixout."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol


class Listener(Protocol):
    """Interface of an object that is notified of loaded or set weights."""

    def weights_were_set(self, ids: set[int]) -> None:
        """Receives the ids of the changed variables."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def add(listener: Listener) -> None:
    """Registers a listener, for as long as it lives."""
    _listeners.add(listener)


def tell(variables: Iterable[Any]) -> None:
    """Notifies all listeners of the changed variables."""
    ids = set(map(id, variables))
    for listener in list(_listeners):
        listener.weights_were_set(ids)
