"""The training calls that are running on this thread, by their parametrizations."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

# An `InPlace`. Its module imports this module.
Owner = Any


class RunningCall(NamedTuple):
    """The present training call of one `InPlace`.

    Attributes:
        state: int64 `[root, number of this call]`. None in a call that only creates weights.
        seeds: Seed of each parametrized weight, by the weight's position.
        training: Training flag of the innermost container.
        covered: Ids of the variables that an effective layer around this point substitutes.
        values: Effective weights that containers have read, by the id of the variable. Each has the
            graph in which it was computed.
    """

    state: tf.Tensor | None
    seeds: dict[int, tf.Tensor]
    training: bool | tf.Tensor
    covered: frozenset[int]
    values: dict[int, list[tuple[tf.Graph | None, tf.Tensor]]]


_local = threading.local()
# Stands for a call that only creates weights.
NO_CALL = RunningCall(None, {}, False, frozenset(), {})


def by_owner() -> dict[Owner, RunningCall]:
    """Returns the running calls on this thread by their `InPlace`. The outermost comes first."""
    return getattr(_local, "calls", {})


@contextlib.contextmanager
def using_calls(calls: dict[Owner, RunningCall]) -> Iterator[None]:
    """Sets the running calls in the body, on this thread."""
    before = by_owner()
    _local.calls = calls
    try:
        yield
    finally:
        _local.calls = before
