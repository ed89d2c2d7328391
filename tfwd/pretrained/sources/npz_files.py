"""Weights in NumPy `.npz` files."""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from tfwd.pretrained.sources.base import Entry, Source, SourceError, rows_at_once, source_errors

_ERRORS = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, NotImplementedError)
_HEADER = "header"  # key in files of tfwd's programs, with JSON about the other arrays


class ArchiveSource(Source):
    """Source of weights in an `.npz` file of `numpy.savez` or of tfwd's programs.

    Args:
        path: Path of the file.

    Attributes:
        header: dict. Header of a file of tfwd's programs. Empty for other files.

    Raises:
        SourceError: If the file does not exist, is incomplete, or has an array of objects.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.entries, self._fortran = {}, {}
        self.header: dict[str, Any] = {}
        with source_errors(path, *_ERRORS):
            self._zip = zipfile.ZipFile(path)
            for info in self._zip.infolist():
                key = info.filename.removesuffix(".npy")
                if key in self.entries:
                    raise SourceError(f"{path} has two arrays with the name '{key}'")
                with self._zip.open(info) as member:
                    shape, fortran, dtype = _header(member)
                    if dtype.hasobject:
                        raise SourceError(
                            f"{path}: '{key}' is an array of Python objects, which tfwd does not "
                            "read: save it with a numeric dtype"
                        )
                    rest = info.file_size - member.tell()
                    if math.prod(shape) * dtype.itemsize != rest:
                        raise SourceError(
                            f"{path} is damaged: '{key}' should be {shape}, but has {rest:,} bytes"
                        )
                if key == _HEADER and (header := self._own_header(info)):
                    self.header = header
                else:
                    self.entries[key] = Entry(tuple(shape), dtype.name)
                    self._fortran[key] = fortran

    def blocks(self, key: str, into: np.ndarray | None = None) -> Iterator[np.ndarray]:
        entry = self.entries[key]
        with source_errors(self.path, *_ERRORS), self._zip.open(f"{key}.npy") as member:
            _, _, dtype = _header(member)
            if self._fortran[key] or not entry.shape:
                values = _read(member, dtype, math.prod(entry.shape))
                yield values.reshape(entry.shape, order="F" if self._fortran[key] else "C")
                _finish(member)
                return
            step, rest = rows_at_once(entry), entry.shape[1:]
            for start in range(0, entry.shape[0], step):
                rows = min(step, entry.shape[0] - start)
                yield _read(member, dtype, rows * math.prod(rest)).reshape(rows, *rest)
            _finish(member)

    def close(self) -> None:
        self._zip.close()

    def _own_header(self, info: zipfile.ZipInfo) -> dict[str, Any] | None:
        """Returns the header of a file of tfwd's programs, or None for another array."""
        with self._zip.open(info) as member:
            shape, _, dtype = _header(member)
            if dtype != np.uint8 or len(shape) != 1 or shape[0] > 1 << 20:
                return None
            try:
                found = json.loads(member.read(shape[0]))
            except (ValueError, RecursionError):
                return None
        is_own = isinstance(found, dict) and str(found.get("format", "")).startswith("tfwd ")
        return found if is_own else None


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Returns the shape of an array, True if it is in Fortran order, and its dtype."""
    version = np.lib.format.read_magic(member)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(member)
    return np.lib.format.read_array_header_2_0(member)


def _read(member: IO[bytes], dtype: np.dtype, count: int) -> np.ndarray:
    """Reads the next numbers of an array."""
    data = member.read(count * dtype.itemsize)
    if len(data) != count * dtype.itemsize:
        raise EOFError("it ends too early")
    return np.frombuffer(data, dtype)


def _finish(member: IO[bytes]) -> None:
    """Reads to the end of an array, where the archive compares the checksum."""
    if member.read(1):
        raise EOFError("an array is longer than its header says")
