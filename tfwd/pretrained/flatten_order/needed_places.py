"""Places that PyTorch's functions need: the channels second or last. They restrict layouts."""

from __future__ import annotations

from collections.abc import Sequence

from tfwd.pretrained.flatten_order.layouts_in_torch import orders_at_end
from tfwd.pretrained.flatten_order.tensor_axes import TensorAxes, has_natural_order, like


def need_last(tensor: TensorAxes, numbers: Sequence[int], reason: str) -> TensorAxes:
    """Restricts a layout to those with some axes last.

    Args:
        tensor: The tensor.
        numbers: Numbers of the axes. Their sizes are above 1.
        reason: Clause that says why the order is unknown, if PyTorch has them elsewhere.

    Returns:
        The tensor. Its order is contradictory if nothing is known of it, because PyTorch's model
        may move the channels to the end.
    """
    if len(tensor.used) < 3 or not numbers:
        return tensor
    places = {tensor.places[number].find() for number in numbers}  # type: ignore[union-attr]
    layout = tensor.layout
    if tensor.is_image_of_caller():
        return tensor  # PyTorch's model may move the channels, and move them back
    if layout.possible is not None:
        kept = {each for each in layout.possible if set(each[-len(places) :]) == places}
        layout.restrict(kept, reason)
    elif layout.is_open:
        layout.restrict(orders_at_end(tensor.used, places), reason)
    else:
        return like(tensor, tensor.axes, layout.reason or reason, is_contradictory=True)
    return tensor


def need_last_for_softmax(tensor: TensorAxes, numbers: Sequence[int], name: str) -> TensorAxes:
    """Restricts a layout to those with the axes of a softmax last.

    Args:
        tensor: The tensor, with more than two axes of a size above 1.
        numbers: As in `need_last`.
        name: Name of the layer or operation.

    Returns:
        The tensor, as in `need_last`.
    """
    reason = f"'{name}' has a softmax over the channels of an image of {tensor.sizes[1:]}"
    if tensor.layout.is_open and tensor.layout.possible is None:
        tensor.layout.contradict(reason)
        return tensor
    return need_last(tensor, numbers, reason)


def need_second(tensor: TensorAxes, number: int, name: str) -> bool:
    """Notes that PyTorch has an axis second, if the layout allows it.

    Args:
        tensor: The tensor.
        number: Number of the axis.
        name: Name of the layer or operation, which has weights for the axis.

    Returns:
        False if the layout does not allow it. The order is then contradictory.
    """
    place, layout = tensor.places[number], tensor.layout
    if len(tensor.used) < 3 or place is None:
        return True
    reason = f"'{name}' normalizes the channels of a sequence of {tensor.sizes[1:]}"
    possible = layout.possible
    if possible is None:
        layout.drop_default(reason)
        if number == len(tensor.axes) - 1:  # only a layer on images can show the order
            layout.require((tensor.used[0], place, *tensor.used[1:-1]))
        return True
    is_second = [each[1] is place.find() for each in possible]
    if not any(is_second):
        layout.contradict(reason, is_sequence=tensor.is_as_in_keras())
        return False
    if not all(is_second):
        layout.drop_default(reason)
    return True


def with_weights(tensor: TensorAxes, numbers: Sequence[int], name: str) -> TensorAxes:
    """Returns a tensor after a layer or operation with a weight for each entry of some axes.

    A weight `[channels]` has the channels last in PyTorch too, and `[channels, 1, 1]` has them
    first. The model does not show which one PyTorch has.

    Args:
        tensor: The tensor.
        numbers: Numbers of the axes. Their sizes are above 1.
        name: Name of the layer or operation.
    """
    layout = tensor.layout
    if tensor.is_as_in_keras() or len(tensor.used) < 3 or tensor.is_image_of_caller():
        return tensor
    part = "channels" if list(numbers) == [len(tensor.axes) - 1] else "positions"
    reason = f"'{name}' has weights for the {part} of an image of {tensor.sizes[1:]}"
    if layout.known is not None:
        return like(tensor, tensor.axes, reason, is_contradictory=True)
    is_clear = len(numbers) < 2 and has_natural_order(tensor.axes)
    if layout.is_open and layout.possible is None and not is_clear:
        layout.contradict(reason)
    if len(numbers) > 1:
        layout.drop_default(reason)
    return tensor
