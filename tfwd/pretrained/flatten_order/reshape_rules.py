"""Effect of flattening and of other reshapes on the order of axes and features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tfwd.pretrained.flatten_order.layer_groups import is_reshape
from tfwd.pretrained.flatten_order.orders import (
    AxisOrder,
    FlattenedAxes,
    JoinedFeatures,
    MovedImageAxes,
    Shape,
    TensorOrder,
    UnknownAxisOrder,
    UnknownFeatureOrder,
    channels_last,
    flattened_axes,
    flattens_differently,
    is_flattened,
    is_image,
    is_order_of_torch,
    is_vector,
)
from tfwd.pretrained.flatten_order.time_steps import with_time, without_time
from tfwd.pretrained.flatten_order.traced_operations import TracedOperation


def permuted_order(order: TensorOrder, axes: Sequence[int], name: str) -> TensorOrder:
    """Returns the order of a tensor's axes after a permutation.

    The order is known only if the permutation brings an image into PyTorch's order of axes.
    PyTorch's model may contain any other permutation too.

    Args:
        order: Order of the axes before the permutation.
        axes: For each axis, its position before the permutation.
        name: str. Name of the layer that permutes.
    """
    if not isinstance(order, tuple):
        return order if isinstance(order, UnknownAxisOrder) else None
    permuted = tuple(order[axis] for axis in axes)
    if permuted == tuple(range(len(order))):
        return MovedImageAxes(permuted) if is_image(order) else permuted
    if permuted == order:
        return permuted
    return unknown_permutation(name)


def unknown_permutation(name: str) -> UnknownAxisOrder:
    """Returns the order after a permutation that PyTorch's model may lack."""
    return UnknownAxisOrder(
        f"the model does not show whether PyTorch's model permutes like '{name}'", is_permuted=True
    )


def flattened_order(
    order: TensorOrder, shape: Shape, name: str, channels_first: bool = False
) -> TensorOrder:
    """Returns the order of the features of a flattened tensor.

    In a backward pass, these are the features that are reshaped to the tensor.

    Args:
        order: Order of the tensor's axes.
        shape: Shape of the tensor.
        name: str. Name of the layer that flattens or reshapes.
        channels_first: bool. True if Keras's `Flatten` moves the first axis behind the others
            before it flattens. Default False.
    """
    if is_flattened(order) and is_vector(shape):
        return order
    if isinstance(order, FlattenedAxes) and None not in shape:
        steps = math.prod(shape[:-1])
        positions = (0, *(position + 1 for position in order.positions))
        return FlattenedAxes((steps, *order.shape), positions)
    if is_flattened(order):
        return UnknownFeatureOrder(f"'{name}' changes flattened features")
    if sum(size != 1 for size in shape) < 2:
        return _order_of_one_axis(order, is_last=is_vector(shape))
    if None in shape:
        is_known = is_order_of_torch(order) or (order is None and len(shape) < 3)
        return None if is_known else UnknownFeatureOrder(f"'{name}' flattens a size that varies")
    if isinstance(order, UnknownAxisOrder):
        return UnknownFeatureOrder(order.reason)
    if not isinstance(order, tuple):
        if len(shape) < 3 and not channels_first:
            return None
        # An image with one channel or one position has the same order in both libraries.
        if not flattened_axes(shape, channels_last(len(shape))) and not channels_first:
            return None
        return UnknownFeatureOrder(
            f"the model does not show what the axes of {shape} at '{name}' are"
        )
    if channels_first:
        shape, order = (*shape[1:], shape[0]), (*order[1:], order[0])
    return flattened_axes(shape, order)


def reshaped_order(order: TensorOrder, shape: Shape, result: Shape, name: str) -> TensorOrder:
    """Returns the order of the axes of a tensor after a reshape to several axes.

    Args:
        order: Order of the axes before the reshape.
        shape, result: Shapes before and after the reshape.
        name: str. Name of the layer that reshapes.
    """
    if result == shape:
        return order
    if isinstance(order, UnknownFeatureOrder):
        return order
    if isinstance(order, JoinedFeatures):
        changed = UnknownFeatureOrder(f"'{name}' changes flattened features")
        return order if result[-1] == shape[-1] else changed
    if isinstance(order, FlattenedAxes):
        if result[-1] == shape[-1]:
            return order
        if result == order.shape:
            return order.positions
        reason = f"'{name}' changes flattened features"
        keeps_last = result[-1] == order.shape[-1]
        return UnknownAxisOrder(reason) if keeps_last else UnknownFeatureOrder(reason)
    if isinstance(order, tuple) and _without_ones(shape) == _without_ones(result):
        return _order_beside_ones(order, shape, result)
    if isinstance(order, tuple) and _flattens_after_time(order, shape, result):
        return flattened_axes(shape[1:], order[1:]) or (0, 1)
    if flattens_differently(order, shape):
        reason = f"'{name}' is a reshape between an image of {shape} and {result}"
    elif isinstance(order, UnknownAxisOrder):
        reason = order.reason
    else:
        return None
    if _last_axis_keeps_order(order, shape, result):
        mixes, is_permuted = _mixes_channels(shape, result), result[-1] != shape[-1]
        if isinstance(order, UnknownAxisOrder):
            mixes = mixes or order.mixes or (order.is_permuted and len(result) < len(shape))
            is_permuted = is_permuted or order.is_permuted
        return UnknownAxisOrder(reason, mixes=mixes, is_permuted=is_permuted)
    return UnknownFeatureOrder(reason)


def _mixes_channels(shape: Shape, result: Shape) -> bool:
    """Returns True if a reshape merges a part of the last axis with other axes."""
    if None in shape or None in result:
        return True
    sizes = [math.prod(result[i:]) for i in range(len(result))]
    return shape[-1] not in sizes


def _flattens_after_time(order: AxisOrder, shape: Shape, result: Shape) -> bool:
    """Returns True for a reshape of a sequence of images to a sequence of features."""
    if len(result) != 2 or None in shape or None in result or order[0] != 0:
        return False
    return result == (shape[0], math.prod(shape[1:]))


def _without_ones(shape: Shape) -> Shape:
    """Returns the sizes of the axes with several entries."""
    return tuple(size for size in shape if size != 1)


def _order_beside_ones(order: AxisOrder, shape: Shape, result: Shape) -> AxisOrder:
    """Returns the order of the axes after a reshape that adds or removes axes of size 1."""
    kept = [position for position, size in zip(order, shape, strict=True) if size != 1]
    positions = iter([sorted(kept).index(position) for position in kept])
    return tuple(-1 if size == 1 else next(positions) for size in result)


def _last_axis_keeps_order(order: TensorOrder, shape: Shape, result: Shape) -> bool:
    """Returns True if the entries on the last axis of a result have the same order in PyTorch.

    Axes of size 1 at the end do not count.
    """
    last = next((entry for entry in reversed(result) if entry != 1), 1)
    size, start = 1, len(shape)
    while start and size != last and shape[start - 1] is not None:
        start -= 1
        size *= shape[start]
    if size != last:  # the last axis is divided, or merged with a part of an axis
        return bool(last and shape[-1]) and shape[-1] % last == 0
    merged = shape[start:]
    if isinstance(order, tuple):
        return flattened_axes(merged, order[start:]) is None
    return sum(size != 1 for size in merged) < 2


def order_of_axes(
    order: TensorOrder, axes: Sequence[int], shape: Shape, result: Shape, name: str
) -> TensorOrder:
    """Returns the order of a tensor after an operation that removes, adds or exchanges axes.

    Args:
        order: Order of the axes before the operation.
        axes: For each axis of the result, the axis that it was; -1 for a new axis.
        shape, result: Shapes before and after the operation.
        name: str. Name of the operation.
    """
    if is_flattened(order):
        if result[-1:] == (1,) and shape[-1:] != (1,):
            return None
        is_last_kept = axes[-1:] == (len(shape) - 1,) and result[-1] == shape[-1]
        is_kept = is_last_kept and len(axes) < len(shape)  # it acts on other axes
        return order if is_kept else UnknownFeatureOrder(f"'{name}' changes flattened features")
    if len(result) < 2 or is_vector(result):
        return _order_of_one_axis(order, is_last=axes[-1:] == (len(shape) - 1,))
    if len(axes) > 1 and sorted(axes) == list(range(len(shape))):
        return permuted_order(order, axes, name)
    if not isinstance(order, tuple):
        return order
    kept = sorted(order[axis] for axis in axes if axis >= 0 and order[axis] >= 0)
    known = {position: kept.index(position) for position in kept}
    return tuple(known.get(order[axis], -1) if axis >= 0 else -1 for axis in axes)


def _order_of_one_axis(order: TensorOrder, *, is_last: bool) -> UnknownFeatureOrder | None:
    """Returns the order of the only axis with several entries that is left of a tensor.

    Args:
        order: Order of the tensor's axes.
        is_last: bool. True if it was the last axis.
    """
    if isinstance(order, UnknownAxisOrder) and order.mixes and not is_last:
        return UnknownFeatureOrder(order.reason)
    return None


def order_across_examples(
    order: TensorOrder, shape: Shape, result: Shape, layer: Any
) -> TensorOrder:
    """Returns the order of a tensor after an operation that changes the number of examples.

    An example is a reshape that makes an example of each time step.

    Args:
        order: Order of the tensor before the operation.
        shape, result: Shapes of an example before and after the operation.
        layer: The operation or layer.
    """
    name, reshapes = layer.name, is_reshape(layer)
    if is_flattened(order):
        is_kept = reshapes and None not in shape[-1:] and shape[-1:] == result[-1:]
        return order if is_kept else UnknownFeatureOrder(f"'{name}' moves flattened features")
    if reshapes and None not in (*shape, *result):
        if math.prod(shape) == math.prod(result[1:]):
            return with_time(order_after_reshape(order, shape, result[1:], name))
        if shape[1:] == result and not isinstance(order, UnknownAxisOrder):
            return without_time(order)
        is_by_time = order is None or (isinstance(order, tuple) and order[0] == 0)
        if math.prod(shape[1:]) == math.prod(result) and is_by_time:
            return order_after_reshape(without_time(order), shape[1:], result, name)
    is_same = order is None or is_order_of_torch(order)
    if is_same and isinstance(layer, TracedOperation) and layer.keeps_last_axis and result[1:]:
        return None  # as in attention that moves queries, keys and values to the first axis
    reason = f"'{name}' moves the axis of the examples"
    is_kept = len(result) > 1 and result[-1] is not None and result[-1:] == shape[-1:]
    return UnknownAxisOrder(reason) if is_kept else UnknownFeatureOrder(reason)


def order_after_reshape(order: TensorOrder, shape: Shape, result: Shape, name: str) -> TensorOrder:
    """Returns the order after a reshape of each example."""
    if len(result) == 1:
        return flattened_order(order, shape, name)
    return reshaped_order(order, shape, result, name)
