"""Operations that take and return the entries of tensors one by one, and normalizations."""

from __future__ import annotations

import tensorflow as tf

from tfwd.pretrained.flatten_order.axes import Axis
from tfwd.pretrained.flatten_order.merges import combined
from tfwd.pretrained.flatten_order.needed_places import (
    need_last_for_softmax,
    need_second,
    with_weights,
)
from tfwd.pretrained.flatten_order.operation_call import OperationCall, Results
from tfwd.pretrained.flatten_order.tensor_axes import (
    Sizes,
    TensorAxes,
    in_order,
    made,
    with_unknown_axes,
)

# Results of these operations on equal entries are equal.
_OF_EQUAL = ("ExpandDims", "Identity", "Reshape", "Softmax", "Squeeze", "StridedSlice", "Transpose")


def elementwise(call: OperationCall) -> Results:
    """Returns the result of an operation on the entries one by one."""
    shape = call.shapes[0]
    result = combined(call.known, shape, call.name, call.recorder.matches)
    for number, tensor in enumerate(call.inputs):
        if tensor is None:
            result = with_table(call, result, tuple(call.operation.inputs[number].shape), number)
    return result


def with_table(call: OperationCall, result: TensorAxes, shape: Sizes, number: int) -> TensorAxes:
    """Returns the result of an operation with a constant or a weight.

    Args:
        call: The operation.
        result: The result without the table.
        shape: Shape of the table, whose last axis is the last axis of the result.
        number: Number of the operation's input that is the table.
    """
    rank = len(result.axes)
    used = [rank - len(shape) + n for n, size in enumerate(shape) if size != 1]
    if not used:
        return result
    is_equal = _has_equal_entries(call.operation.inputs[number].op)
    axes = [result.axes[n] for n in used]
    grown = [n for n in used if result.axes[n] is None]
    if grown:  # the table repeats the tensor
        new = list(result.axes)
        for n in grown:
            new[n] = Axis(call.shapes[0][n], is_repetition=is_equal)
        if not is_equal:
            call.joins_table(number, axes)
        text = f"'{call.name}' combines tensors in several orders of axes"
        return in_order(new, text) if call.owners and result.is_as_in_keras() else made(new, text)
    if is_equal or not call.joins_table(number, axes):
        return result
    if (len(used) > 1 or call.owners) and not _is_bias(call, number):
        return with_weights(result, used, call.name)
    return result


def _is_bias(call: OperationCall, number: int) -> bool:
    """Returns True if an input is the bias of a convolution, which PyTorch's convolution adds."""
    others = [each.op.type for n, each in enumerate(call.operation.inputs) if n != number]
    is_sum = call.traced.kind in ("Add", "BiasAdd")
    return is_sum and any("Conv" in kind for kind in others)


def _has_equal_entries(operation: tf.Operation) -> bool:
    """Returns True if all entries of a result are equal. A softmax of zeros is an example."""
    if operation.type in _OF_EQUAL:
        return _has_equal_entries(operation.inputs[0].op)
    return operation.type in ("ZerosLike", "OnesLike", "Fill")


def softmax(call: OperationCall) -> Results:
    """Returns the result of a softmax over the last axis."""
    tensor = call.known[0]
    if tensor.places[-1] is not None and len(tensor.used) > 2:
        return need_last_for_softmax(tensor, [len(tensor.axes) - 1], call.name)
    return tensor


def batch_normalization(call: OperationCall) -> Results:
    """Returns the results of a normalization of each channel."""
    tensor = call.known[0]
    call.reads([tensor.last])
    for other in call.known[1:]:  # computed scales or offsets
        call.matches(tensor.last, other.last)
    need_second(tensor, len(tensor.axes) - 1, call.name)
    text = f"a result of '{call.name}'"
    others = [with_unknown_axes(shape, text, is_doubted=False) for shape in call.shapes[1:]]
    return [tensor, *others]
