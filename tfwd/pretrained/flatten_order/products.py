"""Matrix products on the last axis, which is the last axis in PyTorch's model too."""

from __future__ import annotations

from tfwd.pretrained.flatten_order.axes import Axis
from tfwd.pretrained.flatten_order.layouts_in_torch import orders_with_last
from tfwd.pretrained.flatten_order.tensor_axes import TensorAxes, in_order, like, made


def with_new_features(
    tensor: TensorAxes, features: Axis | None, name: str, batch: Axis
) -> TensorAxes:
    """Returns the outputs of a matrix product on the last axis.

    Args:
        tensor: The input.
        features: The new last axis.
        name: Name of the layer or operation.
        batch: Axis of the examples.
    """
    axes = (*tensor.axes[:-1], features)
    last, layout = tensor.places[-1], tensor.layout
    reason = f"'{name}' is on the channels of an image of {tensor.sizes[1:]}"
    others = [axis for axis in tensor.axes[:-1] if axis is not None]
    is_one = tensor.has_batch(batch) and len(others) < 3  # the batch, and one other axis
    if last is None:
        order = range(len(axes)) if tensor.is_as_in_keras() and len(others) < 2 else None
        return made(axes, layout.reason or reason, order, is_contradictory=order is None)
    wanted = orders_with_last(tensor.used, last)
    natural = tuple(place.find() for place in tensor.used)
    if tensor.is_image_of_caller():
        return made(axes, reason)  # PyTorch's model may move the channels, and move them back
    if any(layout.allows(each) for each in wanted):
        is_divided = layout.is_open and layout.possible is None
        layout.restrict({natural} if layout.is_natural(natural[:-1]) else wanted, reason)
        if is_divided and features is not None:  # a later image layer would contradict
            return TensorAxes(axes, tensor.places, layout)
        return in_order(axes) if layout.known == natural else made(axes, layout.reason)
    if layout.possible is not None:
        layout.contradict(reason)
        return like(tensor, axes, reason)
    if is_one and layout.is_sequence:
        return in_order(axes)
    # PyTorch's model may move the channels last.
    return like(tensor, axes, layout.reason or reason, is_contradictory=True)
