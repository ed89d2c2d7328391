"""Layout of each variable in a PyTorch file, by the layer that owns the variable.

PyTorch has the outputs on the first axis of a kernel, and Keras on the last. The layer determines
which axes are outputs. tfwd knows them for Keras's own layers. For any other layer, the mapping
must give the layout.
"""

from __future__ import annotations

import dataclasses
import inspect
import math

import keras
import numpy as np

from tfwd import _keras
from tfwd.pretrained.flatten_order.einsum_axes import axes_of_features, einsum_terms
from tfwd.pretrained.flatten_order.layer_groups import (
    NORMALIZED_KERNELS,
    ORDER_PRESERVING_LAYERS,
    unwrapped,
)
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders, Side
from tfwd.pretrained.flatten_order.orders import (
    FeatureOrder,
    FlattenedAxes,
    JoinedFeatures,
    Shape,
    UnknownFeatureOrder,
)
from tfwd.pretrained.layouts import Layout
from tfwd.pretrained.target_variables import Target

_CONVOLUTIONS = (
    *(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D),
    *(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose),
    *(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D),
)
_DEPTHWISE = (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
_SEPARABLE = (keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
CELLS = (keras.layers.SimpleRNNCell, keras.layers.LSTMCell, keras.layers.GRUCell)
WITH_GATES = (keras.layers.LSTMCell, keras.layers.GRUCell)
_NORMALIZATIONS = (keras.layers.BatchNormalization, keras.layers.GroupNormalization)
MATRICES = ("kernel", "recurrent_kernel", "depthwise_kernel", "pointwise_kernel")
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


def feature_sides(target: Target) -> tuple[Side | None, Side | None]:
    """Returns what a variable's first axis and its second axis are: "inputs", "outputs" or None."""
    owner, name, rank = unwrapped(target.owner), target.name, len(target.shape)
    if isinstance(owner, (keras.layers.Dense, *CELLS)):
        if rank == 2 and name == "kernel":
            return "inputs", "outputs"
        if name == "lora_kernel_a":
            return "inputs", None
        if name == "lora_kernel_b":
            return None, "outputs"
        if name in ("bias", "recurrent_kernel"):
            return ("outputs" if rank == 1 or name != "bias" else None), None
    if is_in_einsum(target):
        return ("inputs" if name == "kernel" else None), "outputs"
    return "inputs", "outputs"


def feature_orders(target: Target, orders: LayerOrders) -> tuple[FeatureOrder, FeatureOrder]:
    """Returns the orders of the features on a variable's first axis, and on its second axis."""
    first, second = feature_sides(target)
    inputs, outputs = orders.of(first), orders.of(second)
    if has_sides(target):
        return inputs, outputs
    rank = len(target.shape)
    if rank not in (1, 2) and not (rank > 2 and isinstance(inputs, UnknownFeatureOrder)):
        inputs = None
    if not isinstance(outputs, UnknownFeatureOrder) and rank != 2:
        outputs = None
    return inputs, outputs if rank else None


def has_sides(target: Target) -> bool:
    """Returns True if the layer's formula shows which axis of a weight are inputs or outputs."""
    names = (*MATRICES, "bias", "lora_kernel_a", "lora_kernel_b")
    is_dense = isinstance(unwrapped(target.owner), (keras.layers.Dense, *CELLS))
    return is_in_einsum(target) or (is_dense and target.name in names)


def has_known_use(target: Target) -> bool:
    """Returns True if tfwd knows how the layer uses a weight on features."""
    owner = unwrapped(target.owner)
    convolutions = (*_CONVOLUTIONS, *_DEPTHWISE)
    is_convolution = isinstance(owner, convolutions) and _keras.is_of_keras(type(owner))
    return has_sides(target) or is_convolution or isinstance(owner, ORDER_PRESERVING_LAYERS)


def is_in_einsum(target: Target) -> bool:
    """Returns True for the kernel and the bias of an einsum layer, and False for LoRA's weights."""
    owner = unwrapped(target.owner)
    return isinstance(owner, keras.layers.EinsumDense) and target.name in ("kernel", "bias")


def is_power_iteration(target: Target) -> bool:
    """Returns True for the vector of a `SpectralNormalization`, which no output depends on."""
    return target.name == "vector_u" and isinstance(target.owner, NORMALIZED_KERNELS)


def is_known_layout(target: Target) -> bool:
    """Returns True if owner and name determine the order of a variable's axes in PyTorch."""
    owner, name = target.owner, target.name
    if _may_have_gates(target):
        return False
    if len(target.shape) < 2:
        return True
    if not _is_made_by_keras(target):
        return False
    if isinstance(owner, keras.layers.Embedding):
        return name in ("embeddings", "reverse_embeddings")
    if isinstance(owner, _NORMALIZATIONS):
        return _keras.is_of_keras(type(owner))
    if _is_slope_per_feature(target):
        return True
    if isinstance(owner, keras.layers.EinsumDense):
        # PyTorch has no layer with a kernel per position, or with a kernel that is summed first.
        terms = einsum_terms(owner)
        once = all((axis in terms.inputs) != (axis in terms.output) for axis in terms.kernel)
        return name == "bias" or (name == "kernel" and once)
    if isinstance(owner, _DEPTHWISE):  # its kernel has different names in Keras 2 and Keras 3
        return name in ("kernel", "depthwise_kernel")
    if isinstance(owner, _SEPARABLE):
        return name in ("depthwise_kernel", "pointwise_kernel")
    if isinstance(owner, CELLS):
        return name in ("kernel", "recurrent_kernel", "bias")
    return isinstance(owner, (keras.layers.Dense, *_CONVOLUTIONS)) and name == "kernel"


def _is_made_by_keras(target: Target) -> bool:
    """Returns False if a user's class makes the weight, or divides it into gates by itself.

    Keras's own `build` makes the weight if the class has no other `build`, or if this one calls it.
    """
    owner, cls = target.owner, type(target.owner)
    if _keras.is_of_keras(cls) or cls.__module__.startswith("tfwd."):
        return True
    if target.name in _names_in_own_call(owner):
        # Its own formula may divide the axis into gates by itself, or multiply from another side.
        is_square = len(target.shape) == 2 and target.shape[0] == target.shape[1]
        if is_square or isinstance(owner, WITH_GATES):
            return False
    own_build = inspect.unwrap(cls.build)
    return _keras.is_of_keras(cls, "build") or "build" in own_build.__code__.co_names


def _may_have_gates(target: Target) -> bool:
    """Returns True for a vector of a user's cell that may have an entry for each gate."""
    owner = target.owner
    if not isinstance(owner, WITH_GATES) or len(target.shape) != 1:
        return False
    gates = 3 if isinstance(owner, keras.layers.GRUCell) else 4
    is_own = target.name != "bias" or "bias" in _names_in_own_call(owner)
    return is_own and target.shape[0] == gates * owner.units


def _names_in_own_call(layer: keras.layers.Layer) -> set[str]:
    """Returns the names in a layer's code if a user wrote its `call`; none for Keras's `call`."""
    if _keras.is_of_keras(type(layer), "call"):
        return set()
    return _keras.names_in_code(layer, left_out=("build",))


def _split_axis(order: FeatureOrder, size: int) -> FlattenedAxes:
    """Returns the axes that one axis of a kernel is split into. Without an order, one axis."""
    return order if isinstance(order, FlattenedAxes) else FlattenedAxes((size,), (0,))


def _layout_by_owner(target: Target) -> Layout:
    """Returns the layout in PyTorch of a variable without flattened inputs or outputs."""
    shape, owner, name = target.shape, target.owner, target.name
    if is_in_einsum(target):
        if name == "kernel":
            return _einsum_layout(owner, shape)
        return Layout((math.prod(shape),), shape, tuple(range(len(shape))), shape)
    if _is_slope_per_feature(target):
        return Layout((math.prod(shape),), shape, tuple(range(len(shape))), shape)
    if isinstance(owner, keras.layers.Embedding) and name == "reverse_embeddings":
        return Layout.permuted(shape, (1, 0))
    if is_power_iteration(target):
        return Layout.unchanged(shape)
    if not is_known_layout(target):
        return Layout.permuted(shape, (1, 0)) if len(shape) == 2 else Layout.unchanged(shape)
    if name not in MATRICES:
        return Layout.unchanged(shape)
    if isinstance(owner, _DEPTHWISE) or name == "depthwise_kernel":
        return _depthwise_layout(shape)
    if isinstance(owner, keras.layers.GRUCell):
        return _gru_layout(shape)
    if isinstance(owner, (keras.layers.Dense, *CELLS)):
        return Layout.permuted(shape, (1, 0))
    if isinstance(owner, _CONVOLUTIONS):
        # PyTorch: outputs, inputs, positions; transposed: inputs, outputs, positions.
        # Keras: positions, inputs, outputs; transposed: positions, outputs, inputs.
        positions = len(shape) - 2
        return Layout.permuted(shape, (*range(2, positions + 2), 1, 0))
    return Layout.unchanged(shape)


def _is_slope_per_feature(target: Target) -> bool:
    """Returns True for the slopes of a `PReLU` that all positions share, as in PyTorch."""
    is_vector = sum(size > 1 for size in target.shape) < 2
    return isinstance(target.owner, keras.layers.PReLU) and target.name == "alpha" and is_vector


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


def _einsum_layout(owner: keras.layers.EinsumDense, shape: tuple[int, ...]) -> Layout:
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
