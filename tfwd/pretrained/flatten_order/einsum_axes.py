"""Axes that an `EinsumDense` layer sums over, and axes that it makes, with their order."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from tfwd.pretrained.flatten_order.orders import (
    FeatureOrder,
    FlattenedAxes,
    JoinedFeatures,
    Shape,
    TensorOrder,
    UnknownAxisOrder,
    UnknownFeatureOrder,
    flattened_axes,
    is_flattened,
    is_image,
)
from tfwd.pretrained.flatten_order.reshape_rules import flattened_order


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


def summed_features(
    layer: keras.layers.EinsumDense, order: TensorOrder, shape: Shape
) -> FeatureOrder:
    """Returns the order of the features that an einsum layer sums over.

    Args:
        layer: The layer.
        order: Order of its input.
        shape: Shape of its input.
    """
    axes = _numbers(_terms(layer)[0], einsum_terms(layer).summed, len(shape))
    last = len(shape) - 1
    if isinstance(order, (FlattenedAxes, JoinedFeatures, UnknownFeatureOrder)):
        if last not in axes:
            return None
        if isinstance(order, JoinedFeatures):
            return UnknownFeatureOrder(f"'{layer.name}' sums over joined features")
        several = UnknownFeatureOrder(f"'{layer.name}' sums over flattened features and other axes")
        return order if axes == [last] else several
    reason = f"'{layer.name}' sums over several axes of an image of {shape}"
    return _order_of_axes(layer, order, shape, axes, reason)


def made_features(
    layer: keras.layers.EinsumDense, required: TensorOrder, result: Shape
) -> FeatureOrder:
    """Returns the order of the features that an einsum layer makes.

    Args:
        layer: The layer.
        required: Order that later layers require of the output.
        result: Shape of the output.
    """
    terms = einsum_terms(layer)
    made = [axis for axis in terms.made if axis not in terms.inputs]
    axes = _numbers(_terms(layer)[2], made, len(result))
    reason = f"its outputs become an image after '{layer.name}'"
    return _order_of_axes(layer, required, result, axes, reason)


def einsum_output_order(
    layer: keras.layers.EinsumDense, order: TensorOrder, shape: Shape, result: Shape
) -> TensorOrder:
    """Returns the order of the output of an einsum layer.

    Args:
        layer: The layer.
        order: Order of the input.
        shape, result: Shapes of the input and of the output.
    """
    axes = _numbers(_terms(layer)[0], einsum_terms(layer).summed, len(shape))
    if is_flattened(order) and len(shape) - 1 not in axes:
        return UnknownFeatureOrder(f"'{layer.name}' changes flattened features")
    if len(result) < 2:
        return None
    if len(axes) == len(shape):
        return tuple(range(len(result)))
    return _beside_an_image(layer, order, shape) or tuple(range(len(result)))


def einsum_input_order(
    layer: keras.layers.EinsumDense, required: TensorOrder, shape: Shape, result: Shape
) -> TensorOrder:
    """Returns the order that an einsum layer requires of its input.

    A sum over the last axis alone is a `Linear` layer of PyTorch, which shows the order.

    Args:
        layer: The layer.
        required: Order that later layers require of the output.
        shape, result: Shapes of the input and of the output.
    """
    if len(shape) < 2:
        return None
    axes = _numbers(_terms(layer)[0], einsum_terms(layer).summed, len(shape))
    if len(axes) == len(shape):
        return None
    is_linear = axes == [len(shape) - 1]
    in_torch = tuple(range(len(shape))) if is_linear else None
    return _beside_an_image(layer, required, result) or in_torch


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


def _order_of_axes(
    layer: keras.layers.EinsumDense, order: TensorOrder, shape: Shape, axes: list[int], reason: str
) -> FeatureOrder:
    """Returns the order of features that consist of some axes of a tensor.

    Args:
        layer: The layer.
        order, shape: Order and shape of the tensor.
        axes: Numbers of the axes.
        reason: Why the order is unknown if the axes are a part of the axes of an image.
    """
    sizes = tuple(shape[axis] for axis in axes)
    if len(axes) == len(shape):
        return flattened_order(order, sizes, layer.name)  # type: ignore[return-value]
    if isinstance(order, UnknownAxisOrder) and not order.is_sequence:
        several = sum(size != 1 for size in sizes) > 1
        return UnknownFeatureOrder(order.reason) if several else None
    if isinstance(order, tuple) and flattened_axes(sizes, tuple(order[axis] for axis in axes)):
        return UnknownFeatureOrder(reason)
    return None


def _beside_an_image(layer: Any, order: TensorOrder, shape: Shape) -> UnknownAxisOrder | None:
    """Returns the unknown order of a tensor, if an einsum makes it from some axes of an image."""
    if is_image(order):
        reason = f"'{layer.name}' is on some axes of an image of {shape}"
        return UnknownAxisOrder(reason)
    return order if isinstance(order, UnknownAxisOrder) and not order.is_sequence else None


def _terms(layer: keras.layers.EinsumDense) -> tuple[str, str, str]:
    """Returns the equation's terms: the axes of the input, the kernel and the output."""
    operands, _, output = layer.equation.replace(" ", "").partition("->")
    inputs, _, kernel = operands.partition(",")
    return inputs, kernel, output


def _numbers(term: str, letters: list[str], rank: int) -> list[int]:
    """Returns the numbers of axes of a tensor, without the batch.

    Args:
        term: Letters of all axes. May contain "...".
        letters: Letters of the axes.
        rank: Number of axes of the tensor without the batch.
    """
    before, _, after = term.partition("...")
    numbers = {letter: i - 1 for i, letter in enumerate(before)}
    numbers |= {letter: rank - len(after) + i for i, letter in enumerate(after)}
    return [numbers[letter] for letter in letters]
