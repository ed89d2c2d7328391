"""Delays seeds, so that a graph cannot use them before another tensor is computed."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfwd._graph.cached_constants import constant


def seeds_after(seeds: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor | None]) -> list[tf.Tensor]:
    """Returns the same seeds. In a graph they wait for one of the tensors.

    An integer that is always zero is added to each seed. No graph optimizer can detect that it is
    zero. So a draw does not run before it is needed. It is not merged with forward's equal draw.

    Args:
        seeds: Integer tensors.
        tensors: Tensors or None. The seeds wait for the first numeric tensor of this list.

    Returns:
        Tensors with the same values as the seeds.
    """
    if tf.executing_eagerly():
        return list(seeds)
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype.is_complex:
            tensor = tf.math.real(tensor)
        if tensor.dtype.is_floating or tensor.dtype.is_integer:
            zero = _opaque_zero(tensor)
            return [seed + tf.cast(zero, seed.dtype) for seed in seeds]
    return list(seeds)


def _opaque_zero(tensor: tf.Tensor) -> tf.Tensor:
    """Returns an int32 scalar that is always 0 and depends on the tensor's data."""
    raw = tf.raw_ops
    flat = raw.Reshape(tensor=tensor, shape=constant((-1,), tf.int32))
    begin, end = constant((0,), tf.int32), constant((1,), tf.int32)
    first = raw.StridedSlice(input=flat, begin=begin, end=end, strides=end)  # `flat` may be empty
    zero = constant(0, tensor.dtype)
    both = raw.LogicalAnd(x=raw.Less(x=first, y=zero), y=raw.Greater(x=first, y=zero))
    return raw.Cast(x=raw.Any(input=both, axis=begin), DstT=tf.int32)
