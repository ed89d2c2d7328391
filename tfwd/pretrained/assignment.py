"""Reads tensors and assigns them, each block of a tensor straight to its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd.pretrained.sources import Source, SourceError

if TYPE_CHECKING:
    from tfwd.pretrained.plan import Step


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
        dtype = tf.as_dtype(step.target.dtype).as_numpy_dtype
        axis = step.layout.axis
        if axis is None or not _takes_slices(variable):
            values = np.concatenate([np.atleast_1d(b) for b in _blocks(source, step)])
            values = values.reshape(step.entry.shape)
            variable.assign(_cast(_whole(step, values), dtype))
            continue
        start = 0
        for block in _blocks(source, step):
            part = np.ascontiguousarray(_cast(step.layout.apply(block), dtype))
            place = (slice(None),) * axis + (slice(start, start + len(block)),)
            variable[place].assign(part)
            start += len(block)


def _cast(values: np.ndarray, dtype: type) -> np.ndarray:
    with np.errstate(over="ignore"):  # which was looked for before, or is allowed
        return values.astype(dtype, copy=False)


def _whole(step: Step, values: np.ndarray) -> np.ndarray:
    layout = step.layout
    return np.ascontiguousarray(layout.apply(values)).reshape(step.target.shape)


def _blocks(source: Source, step: Step) -> Iterator[np.ndarray]:
    rows = 0
    for block in source.blocks(step.key):
        rows += len(block) if block.shape else 1
        yield block
    if step.entry.shape and rows != step.entry.shape[0]:
        raise SourceError(f"{source.path}: '{step.key}' ended after {rows} rows")


def _takes_slices(variable: tf.Variable) -> bool:
    """Whether a part of the variable can be assigned; not of one that replicas have copies of."""
    return not hasattr(variable, "values") and len(variable.shape) > 0


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
