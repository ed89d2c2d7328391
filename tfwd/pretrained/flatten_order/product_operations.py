"""Products of tensors, which sum over axes."""

from __future__ import annotations

from collections.abc import Sequence

from tfwd.pretrained.flatten_order.axes import Axis
from tfwd.pretrained.flatten_order.elementwise_operations import with_table
from tfwd.pretrained.flatten_order.merges import matched
from tfwd.pretrained.flatten_order.operation_call import OperationCall, Results
from tfwd.pretrained.flatten_order.products import with_new_features
from tfwd.pretrained.flatten_order.tensor_axes import TensorAxes, in_order, like, permuted, selected


def product(call: OperationCall) -> Results:
    """Returns the result of a matrix product."""
    first, second = call.inputs[:2]
    kind = call.traced.kind
    names = ("transpose_a", "transpose_b") if kind == "MatMul" else ("adj_x", "adj_y")
    flags = [call.operation.get_attr(name) for name in names]
    shape = call.shapes[0]
    if first is not None and second is None:
        return _with_matrices(call, _product_with_matrix(call, first, flags[0]), 1)
    if first is None and second is not None:
        return _with_matrices(call, _matrix_with_product(call, second, flags[1]), 0)
    assert first is not None and second is not None
    rows, summed = (-1, -2) if flags[0] else (-2, -1)
    columns, others = (-2, -1) if flags[1] else (-1, -2)
    call.matches(first.axes[summed], second.axes[others])
    call.recorder.record_reduction(first.axes[summed])
    call.recorder.record_reduction(second.axes[others])
    batches = []
    for number in range(len(shape) - 2):
        given = []
        for tensor in (first, second):
            position = number - len(shape) + len(tensor.axes)
            if position >= 0 and tensor.axes[position] is not None:
                given.append(tensor.axes[position].find())  # type: ignore[union-attr]
        given = list(dict.fromkeys(given))
        batches.append(matched(given, call.name, call.recorder.matches) if given else None)
    axes = [*batches, first.axes[rows], second.axes[columns]]
    for tensor, other in ((first, second), (second, first)):
        _restrict_to_keras(call, tensor, other)
    is_known = not any(flags[:1]) and all(tensor.is_as_in_keras() for tensor in call.known)
    return in_order(axes) if is_known else _of_product(call, axes)


def _restrict_to_keras(call: OperationCall, tensor: TensorAxes, other: TensorAxes) -> None:
    """Restricts an open layout to Keras's order, as the last axes of both tensors are multiplied.

    The other tensor must be known to have this order, or open too.
    """
    layout, natural = tensor.layout, tuple(place.find() for place in tensor.used)
    is_fit = other.layout.is_open or other.is_as_in_keras()
    if layout.is_open and layout.possible is not None and is_fit and len(natural) < 4:
        layout.restrict({natural}, f"'{call.name}' multiplies the last axes")


def _product_with_matrix(
    call: OperationCall, tensor: TensorAxes, is_transposed: bool
) -> TensorAxes | None:
    summed = tensor.axes[-2 if is_transposed else -1]
    size = call.shapes[0][-1]
    if is_transposed:
        return None
    features: Axis | None = None
    if size != 1:
        features = Axis(size) if call.owners else call.dependent(size, [summed])
    call.reads([summed])
    call.reads([features], "outputs")
    if not call.owners:
        call.needs_plain([summed])
    return with_new_features(tensor, features, call.name, call.batch)


def _matrix_with_product(
    call: OperationCall, tensor: TensorAxes, is_transposed: bool
) -> TensorAxes | None:
    rank = len(tensor.axes)
    if is_transposed or rank < 2 or (rank == 2 and tensor.has_batch(call.batch)):
        return None
    axis = tensor.axes[-2]
    call.reads([axis])
    if not call.owners:
        call.needs_plain([axis])
    size = call.shapes[0][-2]
    if len(call.shapes[0]) != rank:
        return None
    if axis is None and size != 1:
        return None
    return selected(tensor, list(range(rank)), {rank - 2: call.dependent(size, [axis])})


def _with_matrices(call: OperationCall, result: TensorAxes | None, number: int) -> Results:
    """Notes that a product has another matrix of weights at each position of some axes.

    Args:
        call: The operation.
        result: The product. None if nothing is known of it.
        number: Number of the input with the matrices.
    """
    shape = tuple(call.operation.inputs[number].shape)
    if result is None or len(shape) > len(result.axes):
        return None
    return with_table(call, result, (*shape[:-2], 1, 1), number)


def einsum(call: OperationCall) -> Results:
    """Returns the result of an `einsum`."""
    equation = call.operation.get_attr("equation").decode().replace(" ", "")
    terms, _, output = equation.partition("->")
    operands = terms.split(",")
    if "." in equation or any(len(set(term)) < len(term) for term in (*operands, output)):
        return None
    axes: dict[str, list[Axis]] = {}
    for term, tensor in zip(operands, call.inputs, strict=True):
        for letter, axis in zip(term, tensor.axes if tensor is not None else (), strict=False):
            if axis is not None:
                axes.setdefault(letter, []).append(axis.find())
    one = {
        letter: matched(list(dict.fromkeys(given)), call.name, call.recorder.matches)
        for letter, given in axes.items()
    }
    if len(operands) == 1:
        return _einsum_of_one(call, operands[0], output)
    constants = [term for term, tensor in zip(operands, call.inputs, strict=True) if not tensor]
    for term in constants:
        call.reads([one.get(letter) for letter in term])
        if not call.owners:
            call.needs_plain([one.get(letter) for letter in term])
    shape = call.shapes[0]
    result = [
        None if size == 1 else one.get(letter) or Axis(size)
        for letter, size in zip(output, shape, strict=True)
    ]
    call.reads([axis for axis in result if axis not in one.values()], "outputs")
    is_known = all(tensor.is_as_in_keras() for tensor in call.known)
    kept = [letter for letter in output if letter in operands[0]]
    is_known = is_known and kept == [letter for letter in operands[0] if letter in output]
    return in_order(result) if is_known else _of_product(call, result)


def _of_product(call: OperationCall, axes: Sequence[Axis | None]) -> TensorAxes:
    """Returns a product whose order is not known."""
    image = next((t for t in call.known if t.layout.is_contradictory), call.known[0])
    few = len([axis for axis in axes if axis is not None]) < 4
    text = f"'{call.name}' is a product of two tensors"
    order = None if few and len(axes) == len(image.axes) else [-1] * len(axes)
    is_image = any(t.layout.known is not None and not t.is_as_in_keras() for t in call.known)
    return like(image, axes, text, order=order, is_contradictory=is_image)


def _einsum_of_one(call: OperationCall, term: str, output: str) -> Results:
    """Returns the result of an einsum of one tensor, which permutes and sums axes."""
    tensor = call.known[0]
    kept = [number for number, letter in enumerate(term) if letter in output]
    if call.batch not in [axis and axis.find() for axis in tensor.axes[:1]] or 0 not in kept:
        return None
    left = selected(tensor, kept, {})
    letters = [term[number] for number in kept]
    return permuted(left, [letters.index(letter) for letter in output], call.name)
