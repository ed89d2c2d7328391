"""Layout of each variable in a PyTorch file, by the layer that owns the variable."""

from __future__ import annotations

import dataclasses
import math

import keras
import numpy as np

from tfwd.pretrained.einsum_layouts import einsum_kernel_layout, einsum_layout
from tfwd.pretrained.flatten_order.einsum_axes import einsum_terms
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders
from tfwd.pretrained.flatten_order.orders import (
    FeatureOrder,
    FlattenedAxes,
    JoinedFeatures,
    Shape,
)
from tfwd.pretrained.known_weights import (
    CELLS,
    CONVOLUTIONS,
    DEPTHWISE,
    MATRICES,
    feature_orders,
    is_in_einsum,
    is_known_layout,
    is_power_iteration,
    is_slope_per_feature,
)
from tfwd.pretrained.layouts import Layout
from tfwd.pretrained.target_variables import Target

# PyTorch has the gates of a GRU in the order reset, update, new. Keras has update, reset, new.
_GRU_GATES = (1, 0, 2)


def layout_of(target: Target, orders: LayerOrders) -> Layout:
    """Returns the layout in which a file of PyTorch has a variable.

    Args:
        target: The variable.
        orders: Orders of the features that the owner takes and returns.
    """
    layout = _layout_by_owner(target)
    inputs, outputs = feature_orders(target, orders)
    if isinstance(inputs, JoinedFeatures):
        rest = layout_of(target, LayerOrders(None, orders.outputs))
        return dataclasses.replace(rest, rows=inputs.rows)
    if not (isinstance(inputs, FlattenedAxes) or isinstance(outputs, FlattenedAxes)):
        return layout
    shape = target.shape
    if is_in_einsum(target):
        return einsum_layout(target, inputs, outputs) or layout  # None is an error in the plan
    first = _split_axis(inputs, shape[0])
    if len(shape) == 1:
        return Layout(shape, first.torch_shape, first.positions, shape)
    if layout.order is not None:  # a GRU
        last = FlattenedAxes((3, shape[1] // 3), (0, 1))
    else:
        last = _split_axis(outputs, shape[1])
    in_file = (*last.torch_shape, *first.torch_shape)
    axes = (*(len(last.positions) + position for position in first.positions), *last.positions)
    return Layout(layout.shape, in_file, axes, shape, layout.order)


def torch_shape(target: Target) -> Shape:
    """Returns the shape that a file of PyTorch has for a variable."""
    return layout_of(target, LayerOrders()).shape


def inputs_first_layout(target: Target, given: LayerOrders, in_file: Shape) -> Layout:
    """Returns the layout of a tensor with its axes in Keras's order.

    Args:
        target: The variable.
        given: Orders of the features in the file, if the mapping gives them.
        in_file: Shape of the tensor in the file.
    """
    shape = target.shape
    if is_in_einsum(target) and target.name == "kernel":
        terms = einsum_terms(target.owner)
        size = dict(zip(terms.kernel, shape, strict=True))
        matrix = [math.prod(size[axis] for axis in part) for part in (terms.summed, terms.made)]
        if given != LayerOrders() or (len(shape) > 2 and in_file == tuple(matrix)):
            found = einsum_layout(target, given.inputs, given.outputs, inputs_first=True)
            return found or Layout.unchanged(shape)
    if is_in_einsum(target) and in_file == (math.prod(shape),):  # a bias of PyTorch
        return einsum_layout(target, None, given.outputs) or Layout.unchanged(shape)
    inputs, outputs = feature_orders(target, given)
    if isinstance(inputs, JoinedFeatures):
        rest = inputs_first_layout(target, LayerOrders(None, given.outputs), in_file)
        return dataclasses.replace(rest, rows=inputs.rows)
    if len(shape) not in (1, 2) or not any(
        isinstance(order, FlattenedAxes) for order in (inputs, outputs)
    ):
        return Layout.unchanged(shape)
    first = _split_axis(inputs, shape[0])
    last = _split_axis(outputs, shape[1]) if len(shape) == 2 else FlattenedAxes((), ())
    split = (*first.torch_shape, *last.torch_shape)
    axes = (*first.positions, *(len(first.positions) + axis for axis in last.positions))
    return Layout(shape, split, axes, shape)


def layout_along(weight: Layout, axis: int) -> tuple[int, Layout] | None:
    """Returns the layout of a vector with an entry for each position on an axis of a weight.

    Args:
        weight: Layout of the weight.
        axis: int. Axis of the variable.

    Returns:
        The axis of the weight in the file that has these positions, and the layout. None if no axis
        of the weight in the file has them.
    """
    size = weight.final[axis]
    others = tuple(i for i in range(len(weight.final)) if i != axis)
    for i, length in enumerate(weight.shape):
        if length != size:
            continue
        along = np.arange(size).reshape([-1 if i == j else 1 for j in range(len(weight.shape))])
        positions = weight.apply(np.broadcast_to(along, weight.shape))
        first = positions.min(others)
        if (first == positions.max(others)).all():
            rows = tuple(first.tolist())
            plain = Layout.unchanged((size,))
            is_plain = rows == tuple(range(size))
            return i, plain if is_plain else dataclasses.replace(plain, rows=rows)
    return None


def _split_axis(order: FeatureOrder, size: int) -> FlattenedAxes:
    """Returns the axes that one axis of a kernel is split into. Without an order, one axis."""
    return order if isinstance(order, FlattenedAxes) else FlattenedAxes((size,), (0,))


def _layout_by_owner(target: Target) -> Layout:
    """Returns the layout in PyTorch of a variable without flattened inputs or outputs."""
    shape, owner, name = target.shape, target.owner, target.name
    if is_in_einsum(target):
        if name == "kernel":
            return einsum_kernel_layout(owner, shape)
        return Layout((math.prod(shape),), shape, tuple(range(len(shape))), shape)
    if is_slope_per_feature(target):
        return Layout((math.prod(shape),), shape, tuple(range(len(shape))), shape)
    if isinstance(owner, keras.layers.Embedding) and name == "reverse_embeddings":
        return Layout.permuted(shape, (1, 0))
    if is_power_iteration(target):
        return Layout.unchanged(shape)
    if not is_known_layout(target):
        return Layout.permuted(shape, (1, 0)) if len(shape) == 2 else Layout.unchanged(shape)
    if name not in MATRICES:
        return Layout.unchanged(shape)
    if isinstance(owner, DEPTHWISE) or name == "depthwise_kernel":
        return _depthwise_layout(shape)
    if isinstance(owner, keras.layers.GRUCell):
        return _gru_layout(shape)
    if isinstance(owner, (keras.layers.Dense, *CELLS)):
        return Layout.permuted(shape, (1, 0))
    if isinstance(owner, CONVOLUTIONS):
        # PyTorch: outputs, inputs, positions; transposed: inputs, outputs, positions.
        # Keras: positions, inputs, outputs; transposed: positions, outputs, inputs.
        positions = len(shape) - 2
        return Layout.permuted(shape, (*range(2, positions + 2), 1, 0))
    return Layout.unchanged(shape)


def _depthwise_layout(shape: tuple[int, ...]) -> Layout:
    """Returns the layout of a depthwise kernel.

    PyTorch's outputs are all multiples of the first input, then of the second input, and so on.
    """
    *positions, inputs, multiplier = shape
    split = (inputs, multiplier, *positions)
    axes = (*range(2, len(split)), 0, 1)
    return Layout((inputs * multiplier, 1, *positions), split, axes, shape)


def _gru_layout(shape: tuple[int, ...]) -> Layout:
    """Returns the layout of a kernel of a GRU, which has three gates."""
    inputs, width = shape
    return Layout((width, inputs), (3, width // 3, inputs), (2, 0, 1), shape, _GRU_GATES)
