"""Draws weights in calls that are no training calls, for `tfwd.predict_samples`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_local = threading.local()


@contextlib.contextmanager
def sampling() -> Iterator[None]:
    """Makes all calls of wrapped layers draw in the body, on this thread.

    Each call takes the number of the next training call. Its parametrizations act as in training.
    All else in the layer depends on the call's own training flag. No gradient is prepared.
    """
    before = is_sampling()
    _local.sampling = True
    try:
        yield
    finally:
        _local.sampling = before


def is_sampling() -> bool:
    """Returns True in the body of `sampling`."""
    return getattr(_local, "sampling", False)
