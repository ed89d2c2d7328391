"""Reads tensors and assigns them, each block directly to its position."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd.pretrained.layouts import Step
from tfwd.pretrained.sources.base import Source, SourceError

_ALIGNMENT = 64  # bytes, of TensorFlow's tensors
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}  # all of these bits: not finite
_LOST = 1e-3  # share of numbers that may become 0 without a warning

# Measured on float32 matrices of 1024 to 4096 rows and columns, on an AMD EPYC (family 26) with 48
# KiB of L1 and 1 MiB of L2 cache per core: 7 to 9 GB/s with tiles of 128 x 128, 0.6 to 1.3 GB/s by
# one copy, 1.5 to 5.6 GB/s by tf.transpose, which needs memory for the whole result besides.
TILE = 128  # rows and columns
_PADDING = 64  # bytes: a line of the cache


def problems_in_numbers(
    source: Source, steps: Sequence[Step], allow_overflow: bool, doubts: list[str]
) -> list[str]:
    """Returns the problems with the numbers of the tensors.

    Problems are copies that differ, numbers too large for their variable, tensors without a finite
    number, and tensors that would become all zero in the variable's dtype. Only tensors with a
    possible problem are read.

    Args:
        source, steps: the open file, and the tensor of each variable.
        allow_overflow: bool. Allows numbers to become infinite.
        doubts: list to which warnings are appended, a phrase each.
    """
    found = []
    for step in steps:
        key, path, dtype = step.key, step.target.path, step.target.dtype
        for copy in step.copies:
            if not _equal(source, step.key, copy):
                found.append(
                    f"keys '{step.key}' and '{copy}' differ, and the model ties them into one "
                    f"variable, '{step.target.path}'"
                )
        if _is_all_bad(source, step):
            found.append(
                f"key '{key}', for '{path}', has no finite number: get the file again; or skip it "
                f"with ignore={key!r} and allow_missing={path!r}"
            )
            continue
        largest, nonzero, lost = _narrowed(source, step)
        if largest and not allow_overflow:
            found.append(
                f"'{path}' is {dtype}, and key '{key}' reaches "
                f"{largest:.3g}, which is infinite in that dtype (allow_overflow=True allows it)"
            )
        if lost and lost == nonzero:
            found.append(
                f"'{path}' is {dtype}, in which all numbers of key '{key}' are 0: make the layer "
                "with a wider dtype"
            )
        elif lost > _LOST * nonzero:
            doubts.append(f"{lost:,} of {nonzero:,} numbers of '{key}' become 0 in {dtype}")
    return found


def assign(source: Source, steps: Sequence[Step], doubts: list[str]) -> None:
    """Assigns each variable its numbers.

    Args:
        source, steps: the open file, and the tensor of each variable.
        doubts: list to which tensors with non-finite numbers are appended, a phrase each.
    """
    for step in steps:
        variable = _keras.variables.tf_variable(step.target.variable)
        bad = [0]
        variable.assign(_tensor(read_value(source, step, bad)))
        if bad[0]:
            count = math.prod(step.entry.shape)
            doubts.append(f"{bad[0]:,} of {count:,} numbers of '{step.key}' are not finite")


def read_value(source: Source, step: Step, bad: list[int] | None = None) -> np.ndarray:
    """Returns the new value of a variable.

    Args:
        source, step: the open file, and the tensor of the variable.
        bad: list of one number, to which the count of non-finite numbers is added.

    Raises:
        SourceError: the tensor cannot be read, or is incomplete.
    """
    dtype = tf.as_dtype(step.target.dtype).as_numpy_dtype
    values = _aligned(step.target.shape, dtype)
    merged = step.layout.merged()
    if merged is None:
        read = np.empty(step.entry.shape, tf.as_dtype(step.entry.dtype).as_numpy_dtype)
        _read_into(read.reshape(-1), source, step, bad)
        _write(values, step.layout.apply(read), tuple(range(values.ndim)))
        return values
    sizes, axes = merged
    if axes == (0,):
        _read_into(values.reshape(-1), source, step, bad)
        return values
    transposed, axis = values.reshape([sizes[i] for i in axes]), axes.index(0)
    start = 0
    for block in _blocks(source, step, bad):
        place = (slice(None),) * axis + (slice(start, start + len(block)),)
        _write(transposed[place], block.reshape(len(block), *sizes[1:]), axes)
        start += len(block)
    return values


def _read_into(values: np.ndarray, source: Source, step: Step, bad: list[int] | None) -> None:
    """Reads a tensor into a flat array, without a copy if the source can."""
    same = values.dtype == tf.as_dtype(step.entry.dtype).as_numpy_dtype
    start = 0
    for block in _blocks(source, step, bad, values if same else None):
        place = values[start : start + block.size]
        if not np.may_share_memory(place, block):
            _write(place, block.reshape(-1), (0,))
        start += block.size


def _tensor(values: np.ndarray) -> tf.Tensor:
    """Returns a tensor in the array's memory, which the variable takes over, or else a copy."""
    try:
        if values.dtype == tf.bfloat16.as_numpy_dtype:  # NumPy does not export it
            bits = tf.experimental.dlpack.from_dlpack(values.view(np.uint16).__dlpack__())
            return tf.bitcast(bits, tf.bfloat16)
        return tf.experimental.dlpack.from_dlpack(values.__dlpack__())
    except (BufferError, TypeError, ValueError, tf.errors.OpError):  # an unknown dtype
        return tf.convert_to_tensor(values)


def _aligned(shape: Sequence[int], dtype: type) -> np.ndarray:
    """Returns an array whose alignment lets TensorFlow use it without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    # NumPy would request huge pages, for which the system may have to free memory.
    memory = np.frombuffer(bytearray(size + _ALIGNMENT), np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _cast(values: np.ndarray, dtype: type) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(dtype, copy=False)


def _blocks(
    source: Source, step: Step, bad: list[int] | None, into: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    rows = 0
    for block in source.blocks(step.key, into):
        rows += len(block) if block.shape else 1
        if bad is not None:
            bad[0] += _not_finite(block)
        yield block
    if step.entry.shape and rows != step.entry.shape[0]:
        raise SourceError(f"{source.path}: '{step.key}' ended after {rows} rows")


def _equal(source: Source, key: str, copy: str) -> bool:
    if source.entries[key] != source.entries[copy]:
        return False
    pairs = zip(source.blocks(key), source.blocks(copy), strict=True)
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)


def _not_finite(block: np.ndarray) -> int:
    """Returns how many numbers are NaN or infinite. In most blocks one sum suffices."""
    name = block.dtype.name
    if name in _EXPONENTS:
        bits = np.ascontiguousarray(block).view(np.uint16) & _EXPONENTS[name]
        return int(np.count_nonzero(bits == _EXPONENTS[name]))
    if block.dtype.kind != "f":
        return 0
    with np.errstate(all="ignore"):
        if np.isfinite(block.sum()):
            return 0
    return int(np.count_nonzero(~np.isfinite(block)))


def _is_all_bad(source: Source, step: Step) -> bool:
    """Returns True if a tensor has numbers and none is finite. The first numbers mostly decide."""
    head = source.head(step.key)
    if not head.size or "float" not in step.entry.dtype or _not_finite(head) < head.size:
        return False
    return all(_not_finite(block) == block.size for block in source.blocks(step.key))


def _narrowed(source: Source, step: Step) -> tuple[float, int, int]:
    """Returns the effect of a narrower dtype on a tensor.

    Returns:
        The largest number that becomes infinite, or 0; how many are not zero; and how many of these
        become zero.
    """
    wider = {"float16": ("bfloat16", "float32", "float64"), "bfloat16": ("float32", "float64")}
    if step.entry.dtype not in wider.get(step.target.dtype, ("float64",)):
        return 0.0, 0, 0
    dtype = tf.as_dtype(step.target.dtype).as_numpy_dtype
    worst, nonzero, lost = 0.0, 0, 0
    for block in source.blocks(step.key):
        narrow = _cast(block, dtype)
        bad = np.isfinite(block) & ~np.isfinite(narrow)
        if bad.any():
            worst = max(worst, float(np.abs(block[bad].astype(np.float64)).max()))
        nonzero += int(np.count_nonzero(block))
        lost += int(np.count_nonzero((block != 0) & (narrow == 0)))
    return worst, nonzero, lost


def _write(place: np.ndarray, values: np.ndarray, axes: tuple[int, ...]) -> None:
    """Writes values with permuted axes, and converts them to the dtype of the target.

    NumPy writes a transposed copy row by row, so it reads each entry from another row. The rows of
    a kernel are often a power of two of bytes apart. The processor's cache has few slots for such
    addresses, so each entry is fetched from slower memory. A copy of a small tile, with slightly
    longer rows, avoids that.

    Args:
        place: the target array.
        values: the values.
        axes: for each axis of `place`, the axis of `values`.
    """
    with np.errstate(over="ignore"):  # overflow was checked before, or is allowed
        if axes == (1, 0):
            _write_matrix(place, values)
        elif axes == (2, 1, 0) and values.shape[2] <= values.shape[1]:
            for i in range(values.shape[2]):
                _write_matrix(place[i], values[:, :, i])
        elif axes == (2, 1, 0):
            for i in range(values.shape[1]):
                _write_matrix(place[:, i], values[:, i])
        else:
            np.copyto(place, np.transpose(values, axes), casting="unsafe")


def _write_matrix(place: np.ndarray, values: np.ndarray) -> None:
    itemsize = place.dtype.itemsize
    bits = f"u{itemsize}"  # NumPy copies other dtypes slowly
    tile = np.empty((TILE, TILE + _PADDING // itemsize), place.dtype)
    place, tile_bits = place.view(bits), tile.view(bits)
    rows, columns = values.shape
    for j in range(0, columns, TILE):
        for i in range(0, rows, TILE):
            part = values[i : i + TILE, j : j + TILE]
            height, width = part.shape
            np.copyto(tile[:height, :width], part, casting="unsafe")
            transposed = tile_bits[:height, :width].T
            place[j : j + width, i : i + height] = transposed
