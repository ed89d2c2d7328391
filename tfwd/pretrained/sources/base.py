"""Sources of weights: what a file holds by name, without reading it; and its numbers, in blocks."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

BLOCK = 1 << 20  # bytes that are read at once, few enough to stay in a core's cache
HEAD = 64  # numbers

ITEM_SIZES = {
    **{"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4},
    **{"int64": 8, "uint64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8},
}


class SourceError(ValueError):
    """A file of weights that cannot be read as what it should be."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a source says of a tensor.

    Attributes:
        shape: its shape.
        dtype: the name of its dtype, as "bfloat16".
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """How many bytes it has; 0 if the dtype is not known."""
        return math.prod(self.shape) * ITEM_SIZES.get(self.dtype, 0)


class Source(abc.ABC):
    """A file of weights, or a folder of them. It is a context manager, which closes it.

    Attributes:
        path: where it is.
        entries: what it has, by key.
        transposed: whether the kernels in it have the outputs first, as PyTorch's.
    """

    path: str
    entries: Mapping[str, Entry]
    transposed: bool = False

    @abc.abstractmethod
    def blocks(self, key: str, into: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Yields the rows of a tensor (along its first axis), some at a time, from the first on.

        A block may be in memory that the next one is read into.

        Args:
            key: the tensor's name.
            into: a flat array of the tensor's size and dtype, into which a source may read. The
                blocks are then parts of it. Other sources ignore it.

        Raises:
            SourceError: they cannot be read.
        """

    def head(self, key: str) -> np.ndarray:
        """Returns a few of a tensor's first numbers, flat.

        Raises:
            SourceError: they cannot be read.
        """
        return np.array(next(iter(self.blocks(key)), ())).reshape(-1)[:HEAD]

    def read(self, key: str) -> np.ndarray:
        """A whole tensor.

        Raises:
            SourceError: it cannot be read, or is not whole.
        """
        shape = self.entries[key].shape
        blocks = [np.array(block, ndmin=1) for block in self.blocks(key)]  # copies
        values = np.concatenate(blocks) if blocks else np.zeros(shape)
        if values.size != math.prod(shape):
            raise SourceError(f"{self.path}: '{key}' ended after {values.size} numbers")
        return values.reshape(shape)

    @abc.abstractmethod
    def close(self) -> None:
        """Closes what is open."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def rows_at_once(entry: Entry) -> int:
    """How many rows of a tensor are about a block."""
    rows = entry.shape[0] if entry.shape else 1
    return max(1, BLOCK * rows // max(1, entry.nbytes))


@contextlib.contextmanager
def readable(path: str | os.PathLike[str], *errors: type[Exception]) -> Iterator[None]:
    """What goes wrong with a file, as a `SourceError` with its name.

    Args:
        path: the file.
        *errors: what a library raises for one that is not whole.
    """
    try:
        yield
    except SourceError:
        raise
    except FileNotFoundError as error:
        raise SourceError(f"{path} is not there") from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error
    except errors as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise SourceError(f"{path} is damaged, or no file of its kind: {reason}") from error
