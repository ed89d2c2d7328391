"""Stacks of tensors along a new axis, and their division."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tfwd.pretrained.flatten_order.axes import Axis
from tfwd.pretrained.flatten_order.merges import combined, joined
from tfwd.pretrained.flatten_order.operation_call import OperationCall, Results
from tfwd.pretrained.flatten_order.pieces import channels_of_piece, joined_axis
from tfwd.pretrained.flatten_order.tensor_axes import Sizes, TensorAxes, made, selected


class StackAxis(Axis):
    """The new axis of a stack.

    Args:
        tensors: The stacked tensors.
    """

    def __init__(self, tensors: Sequence[TensorAxes]) -> None:
        super().__init__(len(tensors))
        self.tensors = tuple(tensors)


def stack(call: OperationCall) -> Results:
    """Returns the result of a stack, which makes a new axis."""
    shape = call.shapes[0]
    axis = call.operation.get_attr("axis") % len(shape)
    if not call.known:
        return None
    one = combined(
        call.known, (*shape[:axis], *shape[axis + 1 :]), call.name, call.recorder.matches
    )
    axes = list(one.axes)
    for position, tensor in enumerate(call.inputs):
        if tensor is None:
            call.joins_table(position, axes)
    if shape[axis] == 1:
        numbers: list[int | None] = list(range(len(shape) - 1))
        numbers.insert(axis, None)
        return selected(one, numbers, {})
    is_known = len(call.known) == len(call.inputs)
    axes.insert(axis, StackAxis(call.known) if is_known else Axis(shape[axis]))
    return made(axes, f"'{call.name}' makes a new axis", natural=())


def unstack(call: OperationCall) -> Results:
    """Returns the results of the division of a tensor into its slices along an axis."""
    tensor = call.inputs[0]
    if tensor is None:
        return None
    rank = len(tensor.axes)
    axis = call.operation.get_attr("axis") % rank
    if axis == 0 and tensor.has_batch(call.batch):
        return None
    call.recorder.record_choice(tensor.axes[axis])
    numbers = [number for number in range(rank) if number != axis]
    name = call.operation.name
    pieces = [
        channels_of_piece(tensor, [axis], call.batch, (name, n)) for n in range(len(call.shapes))
    ]
    return [selected(tensor, numbers, piece) for piece in pieces]


def merged_stack(call: OperationCall, tensor: TensorAxes) -> TensorAxes | None:
    """Returns the result of a reshape that merges the axis of a stack with an axis beside it.

    With the next axis, the stack and the reshape are a concatenation along the next axis. With the
    previous axis, entries of the stacked tensors alternate. Some rotary embeddings join the halves
    of a head in these ways. Returns None for other reshapes, and if an axis alternates that is not
    the last one: PyTorch's pixel shuffle may have it in another order.
    """
    for number, axis in enumerate(tensor.axes):
        if not isinstance(axis, StackAxis):
            continue
        first = number
        whole: Axis | None = None
        if _merges(tensor.sizes, number, call.shapes[0]):
            parts = [each.axes[number] or Axis(1) for each in axis.tensors]
            whole = joined_axis(parts, call.name)
        elif number == len(tensor.axes) - 1 and _merges(tensor.sizes, number - 1, call.shapes[0]):
            first = number - 1
            parts_before = [each.axes[first] for each in axis.tensors]
            whole = call.dependent(call.shapes[0][first], parts_before)
        if whole is not None:
            return joined(axis.tensors, first, whole, call.name, call.recorder.matches)
    return None


def _merges(before: Sizes, first: int, after: Sizes) -> bool:
    """Returns True if a reshape merges an axis with the next axis, and changes no other axis."""
    pair = before[first : first + 2]
    if first < 0 or len(pair) < 2:
        return False
    merged = None if None in pair else math.prod(pair)  # type: ignore[arg-type]
    return after == (*before[:first], merged, *before[first + 2 :])
