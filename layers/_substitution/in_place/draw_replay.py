"""Replay of draws: several passes over a model use the same random numbers in place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import tensorflow as tf

from tfwd.layers._substitution.in_place.running_calls import Owner

_local = threading.local()


class DrawReplay(Protocol):
    """Interface of an object that lets several passes use the same draws."""

    def call(self, link: Any, plain: Callable[[], Any]) -> Any:
        """Runs `plain`, a layer's call on raw weights, on the effective weights of `link`."""

    def state(self, owner: Owner, draw: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns the seed and the number of the next call. `draw` takes a new call number."""


@contextlib.contextmanager
def replaying(replay: DrawReplay) -> Iterator[None]:
    """Takes the numbers of the calls in the body from an object, on this thread."""
    before = getattr(_local, "replay", None)
    _local.replay = replay
    try:
        yield
    finally:
        _local.replay = before


def current_replay() -> DrawReplay | None:
    """Returns the object that gives the numbers of calls on this thread, or None."""
    return getattr(_local, "replay", None)
