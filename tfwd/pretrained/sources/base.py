"""Base class of files with weights: names, shapes and dtypes, and the numbers in blocks."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

BLOCK = 1 << 20  # bytes that are read at once, so that they fit a core's cache
HEAD = 64  # numbers that `head` returns

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
        shape: tuple of int. The shape.
        dtype: str. Name of the dtype, for example "bfloat16".
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Returns the size in bytes; 0 if the dtype is unknown."""
        return math.prod(self.shape) * ITEM_SIZES.get(self.dtype, 0)


class Source(abc.ABC):
    """File of weights, or several files. A context manager that closes them.

    Attributes:
        path: str. Path of the file.
        entries: dict from each key to the shape and dtype of its tensor.
        transposed: bool. True if kernels have the outputs first, as in PyTorch. Default False.
    """

    path: str
    entries: Mapping[str, Entry]
    transposed: bool = False

    @abc.abstractmethod
    def blocks(self, key: str, into: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Yields the rows of a tensor (along its first axis) in blocks, in order.

        A block may be overwritten by the next block.

        Args:
            key: str. Name of the tensor.
            into: Flat array with the tensor's size and dtype. Some sources read into it, and yield
                parts of it. Other sources ignore it. Default None, for other memory.

        Raises:
            SourceError: If the rows cannot be read.
        """

    def head(self, key: str) -> np.ndarray:
        """Returns a tensor's first numbers as a flat array, at most `HEAD`.

        Raises:
            SourceError: If the numbers cannot be read.
        """
        return np.array(next(iter(self.blocks(key)), ())).reshape(-1)[:HEAD]

    def read(self, key: str) -> np.ndarray:
        """Returns a whole tensor.

        Raises:
            SourceError: If the tensor cannot be read, or is incomplete.
        """
        shape = self.entries[key].shape
        blocks = [np.array(block, ndmin=1) for block in self.blocks(key)]  # copies
        values = np.concatenate(blocks) if blocks else np.zeros(shape)
        if values.size != math.prod(shape):
            raise SourceError(
                f"{self.path}: '{key}' ended after {values.size} of {math.prod(shape)} numbers: "
                "get the file again"
            )
        return values.reshape(shape)

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the files."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def rows_at_once(entry: Entry) -> int:
    """Returns how many rows of a tensor make a block of about `BLOCK` bytes."""
    rows = entry.shape[0] if entry.shape else 1
    return max(1, BLOCK * rows // max(1, entry.nbytes))


@contextlib.contextmanager
def source_errors(path: str | os.PathLike[str], *errors: type[Exception]) -> Iterator[None]:
    """Replaces exceptions about a file by a `SourceError` with its path.

    Args:
        path: Path of the file.
        *errors: Exceptions that a library raises for an incomplete file.
    """
    kinds: tuple[type[Exception], ...] = (*errors, RecursionError)  # JSON with many brackets
    try:
        yield
    except SourceError:
        raise
    except FileNotFoundError as error:
        raise SourceError(f"{path} does not exist") from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error
    except kinds as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise SourceError(f"{path} is damaged, or has the wrong extension: {reason}") from error
