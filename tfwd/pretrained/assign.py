"""Reads tensors and assigns them. Each block is written directly to its final position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd.pretrained.layouts import Step
from tfwd.pretrained.number_checks import count_non_finite
from tfwd.pretrained.sources.base import Source, SourceError
from tfwd.pretrained.tiled_transpose import write_permuted

_ALIGNMENT = 64  # bytes, of TensorFlow's tensors


def assign(source: Source, steps: Sequence[Step], warned: list[str]) -> None:
    """Assigns each variable its numbers.

    Args:
        source: The open file.
        steps: Each variable with its tensor.
        warned: list of str. Tensors with NaN or infinity are appended, one phrase each.
    """
    for step in steps:
        variable = _keras.variables.tf_variable(step.target.variable)
        non_finite = [0]
        variable.assign(_tensor(read_value(source, step, non_finite)))
        if non_finite[0]:
            count = math.prod(step.entry.shape)
            warned.append(f"{non_finite[0]:,} of {count:,} numbers of '{step.key}' are not finite")


def finalize_statistics(model: keras.layers.Layer, steps: Iterable[Step]) -> None:
    """Lets `Normalization` layers use their loaded statistics.

    Such a layer computes with constants, which Keras makes from the variables. Functions that `fit`
    or `predict` traced before contain the old constants.
    """
    owners = {id(step.target.owner): step.target.owner for step in steps}
    loaded = [x for x in owners.values() if isinstance(x, keras.layers.Normalization)]
    for layer in loaded:
        layer.finalize_state()
    if loaded:
        for layer in _keras.layers.all_layers(model):
            if isinstance(layer, keras.Model):
                _keras.training.forget_functions(layer)


def read_value(source: Source, step: Step, non_finite: list[int] | None = None) -> np.ndarray:
    """Returns the new value of a variable.

    Args:
        source: The open file.
        step: The variable with its tensor.
        non_finite: list of one int. The count of NaN and infinity is added to it. Default None, for
            no count.

    Raises:
        SourceError: If the tensor cannot be read, or is incomplete.
    """
    dtype = tf.as_dtype(step.target.dtype).as_numpy_dtype
    values = _aligned(step.target.shape, dtype)
    merged = step.layout.merged()
    if merged is None:
        read = np.empty(step.entry.shape, tf.as_dtype(step.entry.dtype).as_numpy_dtype)
        _read_into(read.reshape(-1), source, step, non_finite)
        write_permuted(values, step.layout.apply(read), tuple(range(values.ndim)))
        return values
    sizes, axes = merged
    if axes == (0,):
        _read_into(values.reshape(-1), source, step, non_finite)
        return values
    transposed, axis = values.reshape([sizes[i] for i in axes]), axes.index(0)
    start = 0
    for block in _blocks(source, step, non_finite):
        part = (slice(None),) * axis + (slice(start, start + len(block)),)
        write_permuted(transposed[part], block.reshape(len(block), *sizes[1:]), axes)
        start += len(block)
    return values


def _read_into(
    values: np.ndarray, source: Source, step: Step, non_finite: list[int] | None
) -> None:
    """Reads a tensor into a flat array, without a copy if the source can."""
    same = values.dtype == tf.as_dtype(step.entry.dtype).as_numpy_dtype
    start = 0
    for block in _blocks(source, step, non_finite, values if same else None):
        part = values[start : start + block.size]
        if not np.may_share_memory(part, block):
            write_permuted(part, block.reshape(-1), (0,))
        start += block.size


def _blocks(
    source: Source, step: Step, non_finite: list[int] | None, into: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Yields the blocks of a tensor. Counts their rows, and their NaN and infinity."""
    rows = 0
    for block in source.blocks(step.key, into):
        rows += len(block) if block.shape else 1
        if non_finite is not None:
            non_finite[0] += count_non_finite(block)
        yield block
    if step.entry.shape and rows != step.entry.shape[0]:
        raise SourceError(
            f"{source.path}: '{step.key}' ended after {rows} of {step.entry.shape[0]} rows: "
            "get the file again"
        )


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
    """Returns an array that TensorFlow can use without a copy, because it is aligned."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    # NumPy would request huge pages, for which the system may have to free memory.
    memory = np.frombuffer(bytearray(size + _ALIGNMENT), np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
