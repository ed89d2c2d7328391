"""Layouts in PyTorch of the weights of an `EinsumDense`, which are a matrix and a vector there."""

from __future__ import annotations

import math

import keras

from tfwd.pretrained.flatten_order.einsum_axes import axes_of_features, einsum_terms
from tfwd.pretrained.flatten_order.orders import FeatureOrder, FlattenedAxes
from tfwd.pretrained.layouts import Layout
from tfwd.pretrained.target_variables import Target


def einsum_kernel_layout(owner: keras.layers.EinsumDense, shape: tuple[int, ...]) -> Layout:
    """Returns the layout of an einsum kernel, which is a matrix of all outputs by all inputs.

    PyTorch has the axes in the order of the layer's output and input. The kernel may have them in
    another order.
    """
    terms = einsum_terms(owner)
    size = dict(zip(terms.kernel, shape, strict=True))
    order = [*terms.made, *terms.summed]
    split = tuple(size[axis] for axis in order)
    in_file = (math.prod(size[a] for a in terms.made), math.prod(size[a] for a in terms.summed))
    return Layout(in_file, split, tuple(order.index(axis) for axis in terms.kernel), shape)


def einsum_layout(
    target: Target, inputs: FeatureOrder, outputs: FeatureOrder, inputs_first: bool = False
) -> Layout | None:
    """Returns the layout of a weight of an einsum layer that flattens or makes an image.

    Args:
        target: The kernel or the bias.
        inputs, outputs: Orders of the features that the layer sums over, and that it makes.
        inputs_first: bool. True if the file has a matrix with the inputs on its first axis. Default
            False, for the outputs.

    Returns:
        The layout. None if the features do not divide into the axes of the weight.
    """
    shape = target.shape
    if target.name == "bias":
        divided = _divided_axes(outputs, shape)
        if divided is None:
            return None
        sizes, axes = divided
        return Layout((math.prod(shape),), sizes, sum(axes, ()), shape)
    terms = einsum_terms(target.owner)
    size = dict(zip(terms.kernel, shape, strict=True))
    made = _divided_axes(outputs, tuple(size[axis] for axis in terms.made))
    summed = _divided_axes(inputs, tuple(size[axis] for axis in terms.summed))
    if made is None or summed is None:
        return None
    parts = [(terms.made, *made), (terms.summed, *summed)]
    if inputs_first:
        parts.reverse()
    split: tuple[int, ...] = ()
    axes_of: dict[str, tuple[int, ...]] = {}
    for letters, lengths, groups in parts:
        for letter, group in zip(letters, groups, strict=True):
            axes_of[letter] = tuple(len(split) + axis for axis in group)
        split += lengths
    in_file = tuple(math.prod(lengths) for _, lengths, _ in parts)
    return Layout(in_file, split, sum((axes_of[letter] for letter in terms.kernel), ()), shape)


def _divided_axes(
    order: FeatureOrder, sizes: tuple[int, ...]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]] | None:
    """Returns the sizes of the axes of features in PyTorch, and the axes of each axis of a weight.

    Args:
        order: Order of the features.
        sizes: Sizes of the axes of the weight, in Keras's order.

    Returns:
        The sizes and the axes. None if the features do not divide into the axes of the weight.
    """
    if not isinstance(order, FlattenedAxes):
        return sizes, [(axis,) for axis in range(len(sizes))]
    axes = axes_of_features(order, sizes)
    return None if axes is None else (order.torch_shape, axes)
