"""Axes that an `EinsumDense` layer sums over, and axes that it makes, with their order."""

from __future__ import annotations

import dataclasses
import math

import keras

from tfwd.pretrained.flatten_order.axes import Axis, Division
from tfwd.pretrained.flatten_order.layer_call import Call
from tfwd.pretrained.flatten_order.orders import FlattenedAxes, Shape
from tfwd.pretrained.flatten_order.products import with_new_features
from tfwd.pretrained.flatten_order.reshapes import merged_axis
from tfwd.pretrained.flatten_order.tensor_axes import (
    TensorAxes,
    in_order,
    made,
    opened,
    with_unknown_axes,
)


@dataclasses.dataclass(frozen=True)
class EinsumTerms:
    """Letters of the axes in the equation of an `EinsumDense` layer. "..." is left out.

    Attributes:
        inputs, kernel, output: str. Letters of the axes, in their order.
    """

    inputs: str
    kernel: str
    output: str

    @property
    def summed(self) -> list[str]:
        """Returns the letters of the kernel's inputs, in the order of the layer's input."""
        return [axis for axis in self.inputs if axis in self.kernel and axis not in self.output]

    @property
    def made(self) -> list[str]:
        """Returns the letters of the kernel's outputs, in the order of the layer's output."""
        return [axis for axis in self.output if axis in self.kernel]


def einsum_terms(layer: keras.layers.EinsumDense) -> EinsumTerms:
    """Returns the letters of the axes in an einsum layer's equation."""
    inputs, kernel, output = _terms(layer)
    return EinsumTerms(inputs.replace("...", ""), kernel, output.replace("...", ""))


def einsum_outputs(call: Call) -> list[TensorAxes]:
    """Returns the outputs of an `EinsumDense` layer. Records the features that it sums and makes.

    It is a `Linear` layer of PyTorch on all summed axes, whose outputs are divided.
    """
    layer, tensor, shape = call.layer, call.tensors[0], call.shapes[0]
    terms = einsum_terms(layer)
    sizes = dict(zip(terms.kernel, layer.kernel.shape, strict=True))
    ends = zip(terms.output[::-1], shape[::-1], strict=False)
    if any(sizes.get(letter, size) != size for letter, size in ends):
        reason = f"'{layer.name}' has an activation function that combines features"
        call.recorder.record_plain([layer], "outputs", [Axis(2, doubt=reason)], reason)
        return [with_unknown_axes(shape, reason, call.batch)]
    inputs, _, output = _terms(layer)
    rank = len(tensor.axes)
    summed = _numbers(inputs, terms.summed, rank)
    natural, layout = tuple(tensor.used), tensor.layout
    is_part = summed == list(range(rank - len(summed), rank)) and len(summed) < rank - 1
    is_part &= len(summed) > 1 or not tensor.is_image_of_caller()
    if is_part and layout.is_open and layout.possible is not None and layout.allows(natural):
        layout.restrict({natural}, f"'{layer.name}' is on the last axes of its input")
    new = [axis for axis in terms.made if axis not in terms.inputs]
    numbers = _numbers(output, new, len(shape))
    _record_summed(call, tensor, summed)
    features = [None if shape[n] == 1 else Axis(shape[n]) for n in numbers]
    kept = _kept_axes(inputs, output, tensor, len(shape))
    axes: list[Axis | None] = [
        features[numbers.index(n)] if n in numbers else tensor.axes[kept[n]]
        for n in range(len(shape))
    ]
    result = _with_order(call, tensor, axes, summed, numbers)
    _record_made(call, result, numbers)
    return [result]


def _record_summed(call: Call, tensor: TensorAxes, numbers: list[int]) -> None:
    """Records the axes that a layer sums over."""
    used = [number for number in numbers if tensor.axes[number] is not None]
    axes = [tensor.axes[number] for number in used]
    if len(used) < 2:
        axis = axes[0] if axes else None
        if axis is not None and len(numbers) > 1:
            call.recorder.record_plain([call.layer], "inputs", [axis], "it sums over several axes")
        else:
            call.recorder.record_axis(call.layer, "inputs", axis)
        return
    places = [tensor.places[number] for number in used]
    reason = f"'{call.name}' sums over several axes of an image of {tensor.sizes[1:]}"
    merged = merged_axis(axes, places, tensor.layout, call.name, reason)  # type: ignore[arg-type]
    call.recorder.record_axis(call.layer, "inputs", merged)


def _record_made(call: Call, result: TensorAxes, numbers: list[int]) -> None:
    """Records the axes that a layer makes."""
    used = [number for number in numbers if result.axes[number] is not None]
    parts = [result.axes[number] for number in used]
    if len(parts) < 2:
        call.recorder.record_axis(call.layer, "outputs", parts[0] if parts else None)
        return
    whole = Axis(math.prod(part.size or 0 for part in parts if part is not None))
    for part in parts:
        part.become_part_of(whole)  # type: ignore[union-attr]
    is_whole = len(result.used) == len(parts) + 1
    places = [result.places[number] for number in used]
    division = Division(parts, places, result.layout, is_whole, call.name)  # type: ignore[arg-type]
    whole.divisions.append(division)
    call.recorder.record_axis(call.layer, "outputs", whole)


def _with_order(
    call: Call,
    tensor: TensorAxes,
    axes: list[Axis | None],
    summed: list[int],
    numbers: list[int],
) -> TensorAxes:
    """Returns the output, with the order that its axes have in PyTorch."""
    rank, count = len(tensor.axes), len(axes)
    is_last = summed == list(range(rank - len(summed), rank))
    is_last = is_last and numbers == list(range(count - len(numbers), count))
    others = [axis for axis in axes[: count - len(numbers)] if axis is not None]
    reason = f"'{call.name}' is on some axes of an image of {tensor.sizes[1:]}"
    layout = tensor.layout
    if is_last and len(others) == 1 and len(numbers) > 1:  # the batch
        return opened(axes, call.name)
    if is_last and len(summed) == 1:
        one = with_new_features(tensor, Axis(2), call.name, call.batch)
        if one.is_as_in_keras():
            return in_order(axes)
        return made(axes, reason, is_contradictory=one.layout.is_contradictory)
    if is_last and (tensor.is_as_in_keras() or (len(others) < 3 and layout.possible is None)):
        return in_order(axes)
    if len(others) < 2 and is_last:
        return in_order(axes)
    is_image = layout.possible is not None and not tensor.is_as_in_keras()
    return made(axes, reason, natural=(), is_contradictory=is_image)


def _kept_axes(inputs: str, output: str, tensor: TensorAxes, rank: int) -> dict[int, int]:
    """Returns the number in the input of each axis of the output that is in both."""
    before, _, after = output.partition("...")
    letters = {n: letter for n, letter in enumerate(before)}
    letters |= {rank - len(after) + n: letter for n, letter in enumerate(after)}
    count = len(tensor.axes)
    first, _, last = inputs.partition("...")
    numbers = {letter: n for n, letter in enumerate(first)}
    numbers |= {letter: count - len(last) + n for n, letter in enumerate(last)}
    kept = {n: numbers[letter] for n, letter in letters.items() if letter in numbers}
    if "..." in output:
        shift = len(first) - len(before)
        kept |= {n: n + shift for n in range(len(before), rank - len(after))}
    return kept


def axes_of_features(order: FlattenedAxes, sizes: Shape) -> list[tuple[int, ...]] | None:
    """Divides flattened features into the axes of a kernel.

    Args:
        order: Order of the features.
        sizes: Sizes of the kernel's axes, in Keras's order.

    Returns:
        For each axis of the kernel, the positions in PyTorch of the axes that it consists of. None
        if the features do not divide into these axes.
    """
    groups: list[tuple[int, ...]] = []
    start = 0
    for size in sizes:
        end, count = start, 1
        while count < size and end < len(order.shape):
            count *= order.shape[end]
            end += 1
        if count != size:
            return None
        groups.append(order.positions[start:end])
        start = end
    return groups if start == len(order.shape) else None


def _terms(layer: keras.layers.EinsumDense) -> tuple[str, str, str]:
    """Returns the equation's terms: the axes of the input, the kernel and the output."""
    operands, _, output = layer.equation.replace(" ", "").partition("->")
    inputs, _, kernel = operands.partition(",")
    return inputs, kernel, output


def _numbers(term: str, letters: list[str], rank: int) -> list[int]:
    """Returns the numbers of axes of a tensor.

    Args:
        term: Letters of all axes. May contain "...".
        letters: Letters of the axes.
        rank: Number of axes of the tensor.
    """
    before, _, after = term.partition("...")
    numbers = {letter: i for i, letter in enumerate(before)}
    numbers |= {letter: rank - len(after) + i for i, letter in enumerate(after)}
    return [numbers[letter] for letter in letters]
