"""Axes of the results of TensorFlow's operations that do not move entries between axes."""

from __future__ import annotations

import tensorflow as tf

Axes = tuple[int, ...]

_SAME = ("Pad", "PadV2", "MirrorPad", "Tile", "Roll", "ReverseV2", "Cumsum", "Slice")
_REDUCTIONS = ("Mean", "Sum", "Prod", "Max", "Min", "All", "Any", "EuclideanNorm")


def axes_of_result(operation: tf.Operation) -> Axes | None:
    """Returns the axis of the first input that each axis of the result was; -1 for a new axis.

    The first axis is the batch. None if the operation is not known.
    """
    rank = operation.inputs[0].shape.rank
    if operation.type in _SAME:
        axes: list[int] | None = list(range(rank))
    elif operation.type in _REDUCTIONS:
        axes = _after_reduction(operation, rank)
    elif operation.type == "StridedSlice":
        steps = _constant(operation.inputs[3])
        axes = _after_slice(operation, rank) if steps and min(steps) > 0 else None
    elif operation.type == "Transpose":
        axes = _constant(operation.inputs[1])
    elif operation.type == "Unpack":
        axes = [axis for axis in range(rank) if axis != operation.get_attr("axis") % rank]
    else:
        return None
    return None if axes is None else tuple(axes)


def _constant(tensor: tf.Tensor) -> list[int] | None:
    """Returns the entries of a tensor that does not depend on inputs; else None."""
    value = tf.get_static_value(tensor)
    return None if value is None else [int(entry) for entry in value.ravel()]


def _after_reduction(operation: tf.Operation, rank: int) -> list[int] | None:
    reduced = _constant(operation.inputs[1])
    if reduced is None or operation.get_attr("keep_dims"):
        return None if reduced is None else list(range(rank))
    return [axis for axis in range(rank) if axis not in {each % rank for each in reduced}]


def _after_slice(operation: tf.Operation, rank: int) -> list[int] | None:
    count = operation.inputs[1].shape[0]  # of the entries between the brackets
    masks = {name: operation.get_attr(f"{name}_mask") for name in ("new_axis", "shrink_axis")}
    ellipsis = operation.get_attr("ellipsis_mask")
    new = bin(masks["new_axis"]).count("1")
    axes: list[int] = []
    position = 0
    for entry in range(count):
        bit = 1 << entry
        if ellipsis & bit:
            size = rank - (count - 1 - new)
            axes += range(position, position + size)
            position += size
        elif masks["new_axis"] & bit:
            axes.append(-1)
        else:
            axes += [] if masks["shrink_axis"] & bit else [position]
            position += 1
    return [*axes, *range(position, rank)]
