"""Source of weights that only the chief reads, and that sends all workers what it reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd.pretrained.sources.base import Entry, Source, SourceError
from tfwd.pretrained.sources.opening import open_source

_MESSAGE = 4 << 20  # bytes in a message: smaller messages take longer per byte


def lockstep(variables: Iterable[Any], *classes: type[Exception]) -> _keras.Lockstep:
    """Returns the lockstep of the workers that train some variables.

    Without several workers, the lockstep has only this process.

    Args:
        variables: Variables of Keras layers. May be empty in the scope of a strategy.
        *classes: Classes of exceptions that the other workers also raise, besides Python's own.
    """
    return _keras.Lockstep(_strategy_of(variables), classes)


def open_together(workers: _keras.Lockstep, path: str | os.PathLike[str]) -> Source:
    """Opens a source of weights on the chief. All workers must make the same calls to read it.

    Args:
        workers: The lockstep.
        path: As in `open_source`. It need not exist on other workers.

    Raises:
        SourceError: If the path does not exist on the chief, or cannot be read.
    """
    return open_source(path) if workers.is_alone else _SharedSource(workers, path)


class _SharedSource(Source):
    """Source whose file only the chief opens. All workers get each block from the chief."""

    def __init__(self, workers: _keras.Lockstep, path: str | os.PathLike[str]) -> None:
        self._workers = workers
        self._own: Any = None

        def describe() -> list[Any]:
            own = self._own = open_source(path)
            entries = {key: [entry.shape, entry.dtype] for key, entry in own.entries.items()}
            return [own.path, own.transposed, entries]

        self.path, self.transposed, entries = workers.json_from_chief(describe)
        self.entries = {key: Entry(tuple(shape), dtype) for key, (shape, dtype) in entries.items()}

    def blocks(self, key: str, into: np.ndarray | None = None) -> Iterator[np.ndarray]:
        entry = self.entries[key]
        shape, dtype = entry.shape or (1,), _numpy_dtype(entry)
        count = max(1, _MESSAGE * shape[0] // max(1, entry.nbytes))
        chiefs = self._rows(key, shape, count) if self._workers.is_chief else iter(())
        for start in range(0, shape[0], count):
            rows = min(count, shape[0] - start)
            content = self._workers.bytes_from_chief(lambda: next(chiefs).tobytes())
            yield np.frombuffer(content, dtype).reshape(rows, *shape[1:])

    def head(self, key: str) -> np.ndarray:
        content = self._workers.bytes_from_chief(lambda: self._own.head(key).tobytes())
        return np.frombuffer(content, _numpy_dtype(self.entries[key]))

    def _rows(self, key: str, shape: tuple[int, ...], count: int) -> Iterator[np.ndarray]:
        """Yields a tensor in blocks of `count` rows. The source has blocks of other sizes."""
        block = np.empty((min(count, shape[0]), *shape[1:]), _numpy_dtype(self.entries[key]))
        done = 0  # rows
        for part in self._own.blocks(key):
            rest = np.atleast_1d(part)
            while len(rest) and done < shape[0]:
                start = done % count
                taken = rest[: min(count - start, shape[0] - done)]
                block[start : start + len(taken)] = taken
                rest, done = rest[len(taken) :], done + len(taken)
                if done % count == 0 and done < shape[0]:
                    yield block
        # The last block follows after the whole file was read, because some files end with a
        # checksum.
        if done != shape[0]:
            raise SourceError(
                f"{self.path}: '{key}' ended after {done} of {shape[0]} rows: get the file again"
            )
        yield block[: (done - 1) % count + 1]

    def close(self) -> None:
        if self._own is not None:
            self._own.close()


def _numpy_dtype(entry: Entry) -> Any:
    return tf.as_dtype(entry.dtype).as_numpy_dtype


def _strategy_of(variables: Iterable[Any]) -> tf.distribute.Strategy | None:
    """Returns the strategy of several workers, from the current scope or from variables.

    Returns None without several workers. Also returns None in a graph and in a function of
    `strategy.run`, because workers cannot exchange files there.
    """
    if not tf.executing_eagerly():
        return None
    present = tf.distribute.get_strategy()
    if _keras.has_workers(present):
        return present if tf.distribute.in_cross_replica_context() else None
    for variable in variables:
        held = _keras.variables.tf_variable(variable)
        strategy = getattr(held, "distribute_strategy", None)
        if _keras.has_workers(strategy):
            return strategy
    return None
