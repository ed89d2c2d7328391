"""Reads tensors and assigns them, each block of a tensor straight to its place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd.pretrained.sources import Source, SourceError

if TYPE_CHECKING:
    from tfwd.pretrained.plan import Step

_ALIGNMENT = 64  # bytes, of TensorFlow's tensors


def differences(source: Source, steps: Sequence[Step], allow_overflow: bool) -> list[str]:
    """What is wrong with the numbers: copies that differ, and numbers too large for their variable.

    Only the tensors of which that may be so are read.
    """
    found = []
    for step in steps:
        for copy in step.copies:
            if not _equal(source, step.key, copy):
                found.append(
                    f"keys '{step.key}' and '{copy}' differ, and the model ties them into one "
                    f"variable, '{step.target.path}'"
                )
        if not allow_overflow and (largest := _too_large(source, step)):
            found.append(
                f"'{step.target.path}' is {step.target.dtype}, and key '{step.key}' reaches "
                f"{largest:.3g}, which is infinite there (allow_overflow=True takes it so)"
            )
    return found


def assign(source: Source, steps: Sequence[Step]) -> None:
    """Gives each variable its numbers."""
    for step in steps:
        variable = _keras.variables.tf_variable(step.target.variable)
        variable.assign(_tensor(whole(source, step)))


def whole(source: Source, step: Step) -> np.ndarray:
    """The value that a variable gets.

    Raises:
        SourceError: the tensor cannot be read, or is not whole.
    """
    dtype = tf.as_dtype(step.target.dtype).as_numpy_dtype
    layout, axis = step.layout, step.layout.axis
    if axis is None or not step.entry.shape:
        read = _aligned(step.entry.shape or (1,), tf.as_dtype(step.entry.dtype).as_numpy_dtype)
        start = 0
        for block in _blocks(source, step):
            rows = np.atleast_1d(block)
            read[start : start + len(rows)] = rows
            start += len(rows)
        values = _aligned(step.target.shape, dtype)
        _copy(values, layout.apply(read.reshape(step.entry.shape)).reshape(step.target.shape))
        return values
    values = _aligned(step.target.shape, dtype)
    start = 0
    for block in _blocks(source, step):
        place = (slice(None),) * axis + (slice(start, start + len(block)),)
        _copy(values[place], layout.apply(block))
        start += len(block)
    return values


def _tensor(values: np.ndarray) -> tf.Tensor:
    """A tensor in the array's own memory, which the variable takes over; else a copy."""
    try:
        return tf.experimental.dlpack.from_dlpack(values.__dlpack__())
    except (BufferError, TypeError, ValueError, tf.errors.OpError):  # a dtype that it does not know
        return tf.convert_to_tensor(values)


def _aligned(shape: Sequence[int], dtype: type) -> np.ndarray:
    """An array that begins where TensorFlow takes it as it is."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _copy(place: np.ndarray, values: np.ndarray) -> None:
    with np.errstate(over="ignore"):  # which was looked for before, or is allowed
        np.copyto(place, values, casting="unsafe")


def _cast(values: np.ndarray, dtype: type) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(dtype, copy=False)


def _blocks(source: Source, step: Step) -> Iterator[np.ndarray]:
    rows = 0
    for block in source.blocks(step.key):
        rows += len(block) if block.shape else 1
        yield block
    if step.entry.shape and rows != step.entry.shape[0]:
        raise SourceError(f"{source.path}: '{step.key}' ended after {rows} rows")


def _equal(source: Source, key: str, copy: str) -> bool:
    if source.entries[key] != source.entries[copy]:
        return False
    pairs = zip(source.blocks(key), source.blocks(copy), strict=True)
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)


def _too_large(source: Source, step: Step) -> float | None:
    """The largest number of a tensor that its variable's dtype would make infinite."""

    wider = {"float16": ("bfloat16", "float32", "float64"), "bfloat16": ("float32", "float64")}
    if step.entry.dtype not in wider.get(step.target.dtype, ("float64",)):
        return None
    dtype = tf.as_dtype(step.target.dtype).as_numpy_dtype
    worst = 0.0
    for block in source.blocks(step.key):
        bad = np.isfinite(block) & ~np.isfinite(_cast(block, dtype))
        if bad.any():
            worst = max(worst, float(np.abs(block[bad].astype(np.float64)).max()))
    return worst or None
