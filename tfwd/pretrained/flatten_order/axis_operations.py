"""Operations that remove, add, divide, join or exchange axes, or act along one axis."""

from __future__ import annotations

from collections.abc import Sequence

from tfwd.pretrained.flatten_order.axes import Axis
from tfwd.pretrained.flatten_order.merges import joined
from tfwd.pretrained.flatten_order.operation_call import OperationCall, Results
from tfwd.pretrained.flatten_order.orders import CHANGES_FEATURES
from tfwd.pretrained.flatten_order.pieces import (
    CroppedAxis,
    channels_of_piece,
    cropped,
    is_image,
    joined_axis,
)
from tfwd.pretrained.flatten_order.reshapes import reshaped
from tfwd.pretrained.flatten_order.stacks import merged_stack
from tfwd.pretrained.flatten_order.tensor_axes import (
    TensorAxes,
    appended,
    like,
    made,
    permuted,
    selected,
)

# Operations that choose entries at some positions of an axis.
_SLICES = ("StridedSlice", "Slice", "Split", "SplitV")


def reduction(call: OperationCall) -> Results:
    """Returns the result of a sum, a mean or another reduction along some axes."""
    tensor = call.inputs[0]
    axes = call.constant(1)
    if tensor is None or axes is None:
        return None
    rank = len(tensor.axes)
    reduced = {axis % rank for axis in axes}
    if 0 in reduced and tensor.has_batch(call.batch):
        return of_all_examples(call)
    for number in reduced:
        call.recorder.record_reduction(tensor.axes[number])
    positions = cropped(tensor.axes[number] for number in reduced)
    new = channels_of_piece(tensor, reduced, call.batch, positions) if positions else {}
    is_kept = len(call.shapes[0]) == rank
    if is_kept:
        return selected(tensor, [None if n in reduced else n for n in range(rank)], new)
    return selected(tensor, [n for n in range(rank) if n not in reduced], new)


def of_all_examples(call: OperationCall) -> Results:
    """Returns a result that has no axis of examples, such as a mean of all."""
    axes = [axis for tensor in call.known for axis in tensor.entries if axis is not call.batch]
    new = [call.dependent(size, axes) for size in call.shapes[0]]
    return made(new, f"'{call.name}' moves the axis of the examples", natural=())


def arg_reduction(call: OperationCall) -> Results:
    """Returns the result of an `argmax` or `argmin`."""
    tensor, axis = call.inputs[0], call.constant(1)
    if tensor is None or axis is None:
        return None
    rank = len(tensor.axes)
    call.recorder.record_choice(tensor.axes[axis[0] % rank])  # the results are numbers of entries
    return selected(tensor, [n for n in range(rank) if n != axis[0] % rank], {})


def top_entries(call: OperationCall) -> Results:
    """Returns the largest entries along the last axis, and their numbers."""
    tensor = call.inputs[0]
    if tensor is None:
        return None
    call.recorder.record_choice(tensor.last)
    last = call.dependent(call.shapes[0][-1], [tensor.last])
    found = selected(tensor, list(range(len(tensor.axes))), {len(tensor.axes) - 1: last})
    return [found, found]


def resized_axes(call: OperationCall) -> Results:
    """Returns the result of an operation that keeps the order of axes, such as padding."""
    tensor = call.inputs[0]
    if tensor is None:
        return None
    return _with_sizes(call, tensor, range(len(tensor.axes)))


def _with_sizes(
    call: OperationCall,
    tensor: TensorAxes,
    numbers: Sequence[int | None],
    changed: Sequence[int] = (),
) -> TensorAxes:
    """Returns a tensor with some of the axes, whose sizes or entries may have changed.

    Args:
        call: The operation.
        tensor: Its input.
        numbers: For each axis of the result, its number before; None for a new axis.
        changed: Numbers before of further axes that have other entries.
    """
    shape = call.shapes[0]
    if tensor.layout.possible is None:
        tensor.layout.drop_default(
            f"'{call.name}' acts along an axis that PyTorch may have elsewhere"
        )
    others: dict[int, Axis | None] = {}
    chosen = [n for n in range(len(tensor.axes)) if n not in numbers]
    for size, number in zip(shape, numbers, strict=True):
        if number is None:
            continue
        axis = tensor.axes[number]
        if number in changed or (1 if axis is None else axis.size) != size:
            others[number] = _changed_axis(call, tensor, number, size)
            if size == 1:
                call.recorder.record_choice(axis)
                chosen.append(number)
    if call.traced.kind in _SLICES:
        others = {**channels_of_piece(tensor, chosen, call.batch, call.operation.name), **others}
    grown = [n for n in others if tensor.axes[n] is None and others[n] is not None]
    if grown:  # a repeated axis of size 1
        last = len(tensor.axes) - 1  # of features, which PyTorch may have before the positions
        others |= {n: Axis(shape[numbers.index(n)], is_repetition=n < last) for n in grown}
        axes = [None if n is None else others.get(n, tensor.axes[n]) for n in numbers]
        reason = f"'{call.name}' repeats features at several positions"
        is_of_image = len(axes) > 3 and tensor.has_batch(call.batch)
        return like(tensor, axes, reason, is_contradictory=is_of_image)
    return selected(tensor, numbers, others)


def _changed_axis(
    call: OperationCall, tensor: TensorAxes, number: int, size: int | None
) -> Axis | None:
    """Returns an axis that has another size or other entries after an operation."""
    axis = tensor.axes[number]
    is_position = 0 < number < len(tensor.axes) - 1 and is_image(tensor, call.batch)
    if call.traced.kind in _SLICES and is_position and axis is not None and size != 1:
        return CroppedAxis(size, [axis], f"'{call.name}' {CHANGES_FEATURES}")
    return call.dependent(size, [axis])


def along_one_axis(call: OperationCall) -> Results:
    """Returns the result of a running sum, a roll or a reversal along an axis."""
    tensor = call.inputs[0]
    axes = call.constant(len(call.operation.inputs) - 1)
    if tensor is None or axes is None:
        return None
    rank = len(tensor.axes)
    return _with_sizes(call, tensor, range(rank), [axis % rank for axis in axes])


def strided_slice(call: OperationCall) -> Results:
    """Returns the result of a slice with brackets."""
    tensor, operation = call.inputs[0], call.operation
    steps = call.constant(3)
    if tensor is None or steps is None:
        return None
    rank = len(tensor.axes)
    masks = {name: operation.get_attr(f"{name}_mask") for name in ("new_axis", "shrink_axis")}
    ellipsis = operation.get_attr("ellipsis_mask")
    count = len(steps)
    new = bin(masks["new_axis"]).count("1")
    numbers: list[int | None] = []
    changed: list[int] = []
    position = 0
    for entry in range(count):
        bit = 1 << entry
        if ellipsis & bit:
            size = rank - (count - 1 - new)
            numbers += range(position, position + size)
            position += size
        elif masks["new_axis"] & bit:
            numbers.append(None)
        else:
            if not masks["shrink_axis"] & bit:
                numbers.append(position)
                if steps[entry] != 1:
                    changed.append(position)
            position += 1
    numbers += range(position, rank)
    if 0 not in numbers and tensor.has_batch(call.batch):
        return of_all_examples(call)
    for number in set(range(rank)) - set(numbers):
        call.recorder.record_choice(tensor.axes[number])
    return _with_sizes(call, tensor, numbers, changed)


def transpose(call: OperationCall) -> Results:
    """Returns the result of a permutation of the axes."""
    tensor, order = call.inputs[0], call.constant(1)
    return None if tensor is None or order is None else permuted(tensor, order, call.name)


def reshape(call: OperationCall) -> Results:
    """Returns the result of a reshape, or of an added or removed axis of size 1."""
    tensor = call.inputs[0]
    if tensor is None:
        return None
    return merged_stack(call, tensor) or reshaped(tensor, call.shapes[0], call.name, call.batch)


def concatenation(call: OperationCall) -> Results:
    """Returns the result of a concatenation along an axis."""
    number = call.constant(len(call.operation.inputs) - 1)
    if number is None:
        return None
    rank = len(call.shapes[0])
    axis = number[0] % rank
    tensors = call.inputs[:-1]
    sizes = [tuple(tensor.shape) for tensor in call.operation.inputs[:-1]]
    parts = [
        Axis(size[axis]) if tensor is None or tensor.axes[axis] is None else tensor.axes[axis]
        for tensor, size in zip(tensors, sizes, strict=True)
    ]
    first, has_tokens = call.known[0], False
    for position, tensor in enumerate(tensors):
        others = [n for n in range(rank) if n != axis and sizes[position][n] != 1]
        if tensor is None and call.joins_table(position, [first.axes[n] for n in others]):
            has_tokens = axis != rank - 1
    if axis == 0 and all(tensor.has_batch(call.batch) for tensor in call.known):
        return of_all_examples(call)
    whole = parts[0] if len(parts) == 1 else joined_axis(parts, call.name)  # type: ignore[arg-type]
    result = joined(call.known, axis, whole, call.name, call.recorder.matches)
    if has_tokens and not result.is_as_in_keras():
        # PyTorch's model may have moved the channels to the end, as for a transformer.
        reason = f"'{call.name}' adds positions to an image or a sequence"
        return made(result.axes, reason, is_contradictory=True)
    return result


def split(call: OperationCall) -> Results:
    """Returns the results of the division of a tensor into parts along an axis."""
    tensor = next(iter(call.known))
    number = call.constant(0 if call.operation.type == "Split" else 2)
    if number is None:
        return None
    axis = number[0] % len(tensor.axes)
    results = []
    for part, shape in enumerate(call.shapes):
        new = {axis: _changed_axis(call, tensor, axis, shape[axis])}
        if new[axis] is None:
            call.recorder.record_choice(tensor.axes[axis])
            new |= channels_of_piece(tensor, [axis], call.batch, (call.operation.name, part))
        results.append(selected(tensor, list(range(len(shape))), new))
    return results


def gather(call: OperationCall) -> Results:
    """Returns the result of a choice of entries along an axis, or of rows of a table."""
    operation = call.operation
    params, indices = call.inputs[0], call.inputs[1]
    if params is None and indices is not None:  # rows of a table
        shape = call.shapes[0]
        new = [None if size == 1 else Axis(size) for size in shape[len(indices.axes) :]]
        call.reads(new, "outputs")
        return appended(indices, new)
    if params is None:
        return None
    batches = operation.get_attr("batch_dims")
    number = call.constant(2)
    if number is None:
        return None
    axis = number[0] % len(params.axes)
    rank = len(operation.inputs[1].shape) - batches
    numbers: list[int | None] = list(range(len(params.axes)))
    if axis == 0 or rank > 1 or (indices is not None and batches != axis):
        return None
    if rank == 0:
        call.recorder.record_choice(params.axes[axis])
        return selected(params, [n for n in numbers if n != axis], {})
    return _with_sizes(call, params, numbers, [axis])


def one_hot(call: OperationCall) -> Results:
    """Returns the result of a one-hot encoding, whose new axis is last."""
    tensor = call.inputs[0]
    if tensor is None or call.operation.get_attr("axis") != -1:
        return None
    return appended(tensor, [Axis(call.shapes[0][-1])])
