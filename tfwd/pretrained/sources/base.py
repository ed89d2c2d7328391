"""Sources of weights: the names, shapes and dtypes in a file, and its numbers in blocks."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

BLOCK = 1 << 20  # bytes that are read at once, few enough for the cache of a core
HEAD = 64  # numbers

ITEM_SIZES = {
    **{"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4},
    **{"int64": 8, "uint64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8},
}


class SourceError(ValueError):
    """Error for a file of weights that cannot be read."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Shape and dtype of a tensor in a source.

    Attributes:
        shape: tuple of int.
        dtype: str. The name of the dtype, as "bfloat16".
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Returns the size in bytes; 0 if the dtype is unknown."""
        return math.prod(self.shape) * ITEM_SIZES.get(self.dtype, 0)


class Source(abc.ABC):
    """File of weights, or folder of such files. It is a context manager that closes the file.

    Attributes:
        path: str. The path.
        entries: dict of the shapes and dtypes, by key.
        transposed: bool. True if the kernels have the outputs first, as in PyTorch.
    """

    path: str
    entries: Mapping[str, Entry]
    transposed: bool = False

    @abc.abstractmethod
    def blocks(self, key: str, into: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Yields the rows of a tensor (along its first axis) in blocks, in order.

        The next block may reuse the memory of a block.

        Args:
            key: str. The tensor's name.
            into: flat array of the tensor's size and dtype, into which a source may read. The
                blocks are then parts of it. Other sources ignore it.

        Raises:
            SourceError: the rows cannot be read.
        """

    def head(self, key: str) -> np.ndarray:
        """Returns a few of a tensor's first numbers, flat.

        Raises:
            SourceError: the numbers cannot be read.
        """
        return np.array(next(iter(self.blocks(key)), ())).reshape(-1)[:HEAD]

    def read(self, key: str) -> np.ndarray:
        """Returns a whole tensor.

        Raises:
            SourceError: the tensor cannot be read, or is incomplete.
        """
        shape = self.entries[key].shape
        blocks = [np.array(block, ndmin=1) for block in self.blocks(key)]  # copies
        values = np.concatenate(blocks) if blocks else np.zeros(shape)
        if values.size != math.prod(shape):
            raise SourceError(f"{self.path}: '{key}' ended after {values.size} numbers")
        return values.reshape(shape)

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the files."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def rows_at_once(entry: Entry) -> int:
    """Returns how many rows of a tensor are about a block."""
    rows = entry.shape[0] if entry.shape else 1
    return max(1, BLOCK * rows // max(1, entry.nbytes))


@contextlib.contextmanager
def readable(path: str | os.PathLike[str], *errors: type[Exception]) -> Iterator[None]:
    """Turns exceptions about a file into a `SourceError` with its name.

    Args:
        path: path of the file.
        *errors: exceptions that a library raises for an incomplete file.
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
