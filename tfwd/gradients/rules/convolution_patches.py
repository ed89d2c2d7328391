"""Parts of the input that are multiplied with each entry of a convolution's kernel."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfwd.gradients.gradient_forms import size


def windows(
    x: tf.Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    padding: str,
) -> list[tf.Tensor]:
    """Returns the input under each entry of the kernel, in row-major order, at every position.

    Args:
        x: `[B, *spatial, C]`.
        kernel, strides, dilation: One number per spatial axis.
        padding: "valid", "same" or "causal", as in TensorFlow.

    Returns:
        Tensors `[B, *positions, C]`.
    """
    ends, begins, counts = [], [], []
    for axis, (k, s, d) in enumerate(zip(kernel, strides, dilation, strict=True), 1):
        length = size(x, axis)
        extent = (k - 1) * d + 1
        if padding == "same":
            count = (length + s - 1) // s
            total = _positive((count - 1) * s + extent - length)
            before, after = total // 2, total - total // 2
        else:
            before, after = (extent - 1 if padding == "causal" else 0), 0
            count = (length + before - extent) // s + 1
        begins.append(before)
        ends.append(after)
        counts.append(count)
    rank = len(kernel)
    pads = [[0, 0], *([b, e] for b, e in zip(begins, ends, strict=True)), [0, 0]]
    x = tf.pad(x, pads)
    found = []
    for entry in _entries(kernel):
        cut = [slice(None)]
        for axis in range(rank):
            start = entry[axis] * dilation[axis]
            last = start + (counts[axis] - 1) * strides[axis] + 1
            cut.append(slice(start, last, strides[axis]))
        found.append(x[tuple(cut)])
    return found


def _entries(kernel: Sequence[int]) -> list[tuple[int, ...]]:
    entries: list[tuple[int, ...]] = [()]
    for count in kernel:
        entries = [(*entry, i) for entry in entries for i in range(count)]
    return entries


def _positive(value: int | tf.Tensor) -> int | tf.Tensor:
    return max(value, 0) if isinstance(value, int) else tf.maximum(value, 0)
