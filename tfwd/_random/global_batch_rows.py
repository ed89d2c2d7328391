"""Rows of a batch that is divided among several workers.

Each worker draws the masks that its rows have in the whole batch. So the masks do not depend on the
number of workers.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf


class BatchRows(NamedTuple):
    """Part of a batch.

    Attributes:
        start: Integer scalar. Index of the part's first row in the whole batch.
        total: Integer scalar. Number of rows of the whole batch.
    """

    start: Any
    total: Any

    def of(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the indices of a tensor's rows in the whole batch, int32 `[rows]`."""
        return tf.cast(self.start, tf.int32) + tf.range(tf.shape(tensor)[0])


_part: contextvars.ContextVar[BatchRows | None] = contextvars.ContextVar("part", default=None)


@contextlib.contextmanager
def part_of(start: Any, total: Any) -> Iterator[None]:
    """Declares that the batch, in the body, is a part of a batch of `total` rows."""
    token = _part.set(BatchRows(start, total))
    try:
        yield
    finally:
        _part.reset(token)


def current() -> BatchRows | None:
    """Returns the current part of the batch, or None if the batch is not divided."""
    return _part.get()
