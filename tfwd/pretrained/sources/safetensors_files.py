"""Weights in one safetensors file, or in several files with an index."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from safetensors import SafetensorError, safe_open

from tfwd.pretrained.sources.base import (
    HEAD,
    ITEM_SIZES,
    Entry,
    Source,
    SourceError,
    rows_at_once,
    source_errors,
)

INDEX = ".safetensors.index.json"

_DTYPES = {
    **{"BOOL": "bool", "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
_LONGEST_HEADER = 100 << 20  # bytes, the limit of the library


class SafetensorsSource(Source):
    """Source of weights in a safetensors file.

    Args:
        path: Path of the file.

    Raises:
        SourceError: If the file does not exist, is incomplete, or has two tensors of one name.
    """

    transposed = True

    def __init__(self, path: str) -> None:
        self.path = path
        with source_errors(path, SafetensorError, ValueError):
            begin, header = _read_header(path)
            _check_size(path, begin, header)
            # The library also checks that the file is complete.
            file: Any = safe_open(path, framework="numpy", backend="pread")
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            self.entries = {
                key: Entry(tuple(part.get_shape()), _dtype(part.get_dtype()))
                for key, part in slices.items()
            }
            self._starts = {key: begin + header[key]["data_offsets"][0] for key in slices}

    def blocks(self, key: str, into: np.ndarray | None = None) -> Iterator[np.ndarray]:
        entry = self.entries[key]
        if not entry.shape:
            entry = Entry((1,), entry.dtype)
        shape, step = entry.shape, rows_at_once(entry)
        row = entry.nbytes // shape[0] if shape[0] else 0
        # One buffer for all blocks: the first use of new memory takes longer than the read.
        if into is None:
            memory = np.empty(min(step, shape[0]) * row, np.uint8)
        else:
            memory = into.view(np.uint8)
        dtype = tf.as_dtype(entry.dtype).as_numpy_dtype
        with source_errors(self.path, ValueError), open(self.path, "rb", buffering=0) as file:
            file.seek(self._starts[key])
            for start in range(0, shape[0], step):
                rows = min(step, shape[0] - start)
                begin = 0 if into is None else start * row
                block = memory[begin : begin + rows * row]
                _fill(file, block)
                yield block.view(dtype).reshape(rows, *shape[1:])

    def head(self, key: str) -> np.ndarray:
        entry = self.entries[key]
        dtype = tf.as_dtype(entry.dtype).as_numpy_dtype
        values = np.empty(min(HEAD, math.prod(entry.shape)), dtype)
        with source_errors(self.path, ValueError), open(self.path, "rb", buffering=0) as file:
            file.seek(self._starts[key])
            _fill(file, values.view(np.uint8))
        return values

    def close(self) -> None:
        pass


class ShardedSource(Source):
    """Source of weights in several safetensors files, with an index of the tensors.

    Args:
        path: Path of the index, a JSON file.

    Raises:
        SourceError: If a file does not exist, is incomplete, is in another folder, or does not have
            the tensors that the index lists.
    """

    transposed = True

    def __init__(self, path: str) -> None:
        self.path = path
        with source_errors(path, ValueError), open(path, encoding="utf-8") as file:
            index = json.load(file, object_pairs_hook=unique)
            files = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
                raise SourceError(
                    f"{path} is not an index of shards: it has no 'weight_map' with file names"
                )
        folder = os.path.dirname(path) or "."
        self._shards = {name: _shard(folder, name) for name in sorted(set(files.values()))}
        self._shard_of = files
        self.entries = {}
        for key, name in files.items():
            if key not in self._shards[name].entries:
                raise SourceError(f"{path} lists '{key}' in {name}, which does not have it")
            self.entries[key] = self._shards[name].entries[key]
        for name, shard in self._shards.items():
            if more := [key for key in shard.entries if files.get(key) != name]:
                raise SourceError(
                    f"{shard.path} has '{more[0]}', which {os.path.basename(path)} lists in "
                    f"{files.get(more[0], 'no file')}"
                )

    def blocks(self, key: str, into: np.ndarray | None = None) -> Iterator[np.ndarray]:
        yield from self._shards[self._shard_of[key]].blocks(key, into)

    def head(self, key: str) -> np.ndarray:
        return self._shards[self._shard_of[key]].head(key)

    def close(self) -> None:
        for shard in self._shards.values():
            shard.close()


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object as a dict. Raises a `SourceError` for a repeated name.

    Args:
        pairs: Names and values, as `json` passes them to `object_pairs_hook`.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise SourceError(f"the name '{name}' appears twice")
        found[name] = value
    return found


def _shard(folder: str, name: str) -> SafetensorsSource:
    """Opens a file of an index. Raises a `SourceError` if it is in another folder."""
    path = os.path.join(folder, name)
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise SourceError(f"{folder}: the index lists {name!r}, which is not in that folder")
    check_inside(path)
    return SafetensorsSource(path)


def check_inside(path: str) -> None:
    """Raises a `SourceError` if a file is a link to another folder.

    Links in the cache of the Hugging Face hub are allowed: `snapshots/REVISION/` links to `blobs/`.
    """
    folder, real = os.path.realpath(os.path.dirname(path) or "."), os.path.realpath(path)
    cache = os.path.dirname(os.path.dirname(folder))
    blobs = os.path.join(cache, "blobs")
    if os.path.dirname(real) not in (folder, blobs):
        raise SourceError(
            f"{path} is a link to another folder, to {real}: copy the file itself into the folder"
        )


def _fill(file: Any, block: np.ndarray) -> None:
    """Fills a block with the next bytes of a file."""
    rest = block.reshape(-1).data
    while rest:
        count = file.readinto(rest)
        if not count:
            raise ValueError(f"the file ends {len(rest):,} bytes too early")
        rest = rest[count:]


def _read_header(path: str) -> tuple[int, dict[str, Any]]:
    """Returns the position of the data, and the header's entries.

    Raises a `SourceError` if two tensors have one name. The library would use only the last.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        if len(first) < 8:
            raise SourceError(
                f"{path} is damaged: it has {size} bytes, too few for a header; get it again"
            )
        (length,) = struct.unpack("<Q", first)
        if length > min(size - 8, _LONGEST_HEADER):
            raise SourceError(
                f"{path} is damaged, or was not copied completely: its header has {length:,} "
                f"bytes, and the file {size:,}"
            )
        try:
            return 8 + length, json.loads(file.read(length), object_pairs_hook=unique)
        except SourceError as error:
            raise SourceError(f"{path} is damaged: {error}") from error


def _check_size(path: str, begin: int, header: Any) -> None:
    """Raises a `SourceError` if a file is incomplete. The library reports other errors."""
    ends = {
        name: entry["data_offsets"][1]
        for name, entry in (header.items() if isinstance(header, dict) else ())
        if isinstance(entry, dict) and _are_offsets(entry.get("data_offsets"))
    }
    size = os.path.getsize(path) - begin
    cut = sorted((end, name) for name, end in ends.items() if end > size)
    if cut:
        wanted = begin + max(end for end, _ in cut)
        raise SourceError(
            f"{path} is incomplete: it ends within '{cut[0][1]}', after {begin + size:,} of "
            f"{wanted:,} bytes; get it again"
        )


def _are_offsets(found: Any) -> bool:
    """Returns True for the two offsets of a tensor."""
    return isinstance(found, list) and len(found) == 2 and all(type(n) is int for n in found)


def _dtype(code: str) -> str:
    """Returns the name of a dtype in TensorFlow. An unknown dtype keeps its name."""
    name = _DTYPES.get(code, code.lower())
    return name if name in ITEM_SIZES else code.lower()
