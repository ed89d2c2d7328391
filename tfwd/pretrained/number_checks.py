"""Checks of the numbers in a file before anything is assigned: overflow, zeros, NaN, copies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfwd.pretrained.layouts import Step
from tfwd.pretrained.sources.base import Source

_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}  # NaN and infinity have all of these bits
_UNDERFLOW = 1e-3  # share of numbers that may become 0 without a warning


def problems_in_numbers(
    source: Source, steps: Sequence[Step], allow_overflow: bool, warned: list[str]
) -> list[str]:
    """Returns the errors in the numbers of the tensors.

    These are copies that differ, numbers too large for their variable, tensors without a finite
    number, and tensors that would become all zero in the variable's dtype. Only tensors that may
    have an error are read.

    Args:
        source: The open file.
        steps: Each variable with its tensor.
        allow_overflow: bool. Lets numbers become infinite.
        warned: list of str. Warnings are appended, one phrase each.
    """
    found = []
    for step in steps:
        key, path, dtype = step.key, step.target.path, step.target.dtype
        for copy in step.copies:
            if not _equal(source, step.key, copy):
                found.append(
                    f"keys '{step.key}' and '{copy}' differ, but the model has one variable for "
                    f"both, '{step.target.path}'"
                )
        if _has_no_finite_number(source, step):
            found.append(
                f"key '{key}', for '{path}', has no finite number: get the file again, or "
                "remove the variable from the mapping and give "
                f"ignore={key!r} and allow_missing={path!r}"
            )
            continue
        largest, nonzero, zeros = _narrowed(source, step)
        if largest and not allow_overflow:
            found.append(
                f"'{path}' is {dtype}, and key '{key}' reaches {largest:.3g}, which is infinite in "
                "that dtype: use a wider dtype, or plan.apply(allow_overflow=True)"
            )
        if zeros and zeros == nonzero:
            found.append(
                f"'{path}' is {dtype}, in which all numbers of key '{key}' are 0: make the layer "
                "with a wider dtype"
            )
        elif zeros > _UNDERFLOW * nonzero:
            warned.append(f"{zeros:,} of {nonzero:,} numbers of '{key}' become 0 in {dtype}")
    return found


def count_non_finite(block: np.ndarray) -> int:
    """Returns how many numbers are NaN or infinite. For most blocks, one sum suffices."""
    name = block.dtype.name
    if name in _EXPONENTS:
        native = block.astype(block.dtype.newbyteorder("="), copy=False)
        bits = np.ascontiguousarray(native).view(np.uint16) & _EXPONENTS[name]
        return int(np.count_nonzero(bits == _EXPONENTS[name]))
    if block.dtype.kind != "f":
        return 0
    with np.errstate(all="ignore"):
        if np.isfinite(block.sum()):
            return 0
    return int(np.count_nonzero(~np.isfinite(block)))


def _equal(source: Source, key: str, copy: str) -> bool:
    """Returns True if two tensors are equal. NaN equals NaN."""
    if source.entries[key] != source.entries[copy]:
        return False
    pairs = zip(source.blocks(key), source.blocks(copy), strict=True)
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)


def _has_no_finite_number(source: Source, step: Step) -> bool:
    """Returns True if a tensor has numbers, but no finite ones. Its first numbers mostly decide."""
    head = source.head(step.key)
    if not head.size or "float" not in step.entry.dtype or count_non_finite(head) < head.size:
        return False
    return all(count_non_finite(block) == block.size for block in source.blocks(step.key))


def _narrowed(source: Source, step: Step) -> tuple[float, int, int]:
    """Returns the effect of a narrower dtype on a tensor.

    Returns:
        The largest number that becomes infinite, or 0. The count of numbers that are not zero. The
        count of these that become zero.
    """
    wider = {"float16": ("bfloat16", "float32", "float64"), "bfloat16": ("float32", "float64")}
    if step.entry.dtype not in wider.get(step.target.dtype, ("float64",)):
        return 0.0, 0, 0
    dtype = tf.as_dtype(step.target.dtype).as_numpy_dtype
    largest, nonzero, zeros = 0.0, 0, 0
    for block in source.blocks(step.key):
        with np.errstate(over="ignore"):
            narrow = block.astype(dtype, copy=False)
        infinite = np.isfinite(block) & ~np.isfinite(narrow)
        if infinite.any():
            largest = max(largest, float(np.abs(block[infinite].astype(np.float64)).max()))
        nonzero += int(np.count_nonzero(block))
        zeros += int(np.count_nonzero((block != 0) & (narrow == 0)))
    return largest, nonzero, zeros
