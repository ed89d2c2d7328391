"""Rules for layers before which PyTorch's model may have moved the channels of an image last.

PyTorch's `LayerNorm` normalizes the last axes. To normalize channels, PyTorch's model moves them to
the end. The Keras model does not show whether PyTorch's model moves them back before it flattens.
PyTorch's `BatchNorm1d` needs the channels of a sequence on the first axis, with the same effect.
"""

from __future__ import annotations

import math
from typing import Any

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.layer_groups import (
    FIRST_AXIS_LAYERS,
    IMAGE_LAYERS,
    LAST_AXES_LAYERS,
    ORDER_PRESERVING_LAYERS,
    combines_entries_one_by_one,
    has_image_layers,
    image_axes,
    operation_name,
)
from tfwd.pretrained.flatten_order.orders import (
    AxisOrder,
    Shape,
    TensorOrder,
    UnknownAxisOrder,
    UnknownFeatureOrder,
    beside_used_ones,
    flattens_differently,
    is_flattened,
    is_order_of_torch,
)
from tfwd.pretrained.flatten_order.traced_operations import TracedOperation

_SOFTMAX = ("softmax", "sparsemax")
_NORMALIZATIONS = ("layernorm", "rmsnorm")  # names of operations


def order_after(layer: Any, order: TensorOrder, shape: Shape) -> TensorOrder:
    """Returns the order of an image after a layer that keeps its axes, or before this layer.

    The order becomes unknown if PyTorch's layer may need another order of axes.

    Args:
        layer: Layer without wrappers, or operation of a graph.
        order: Order of the image on the other side of the layer.
        shape: Shape of the image.
    """
    name = getattr(layer, "name", "")
    if is_flattened(order) and _normalizes_groups(layer, shape):
        return UnknownFeatureOrder(f"'{name}' normalizes groups of flattened features")
    if beside_used_ones(order, shape):
        return UnknownAxisOrder(f"'{name}' combines axes that PyTorch's model may have elsewhere")
    is_same = order is None or is_order_of_torch(order)
    if is_same and len(shape) > 1 and _normalizes_last_channels(layer, shape):
        reason = f"'{name}' normalizes the channels of a sequence of {shape}"
        return UnknownAxisOrder(reason, yields=order is None, is_sequence=True)
    if is_same and len(shape) == 2 and has_own_convolution(layer, shape):
        return UnknownAxisOrder(f"'{name}' is a custom layer, and may be a convolution")
    if not isinstance(order, tuple):
        return order
    if not flattens_differently(order, shape):
        return order
    if _is_softmax_over_channels(layer, order):
        return UnknownAxisOrder(f"'{name}' has a softmax over the channels of an image of {shape}")
    if _normalizes_some_axes(layer, order, shape):
        return UnknownAxisOrder(f"'{name}' normalizes some axes of an image of {shape}")
    if _has_other_weights(layer, order, shape):
        return UnknownAxisOrder(f"'{name}' has weights for the positions of an image of {shape}")
    return order


def order_of_positions(layer: Any, order: TensorOrder, shape: Shape) -> UnknownFeatureOrder | None:
    """Returns the unknown order of the positions of an image, if PyTorch has them in another order.

    An example is a sequence with an added axis of channels: PyTorch has its features first.

    Args:
        layer: One of `IMAGE_LAYERS`.
        order: Order of the axes of its input.
        shape: Shape of its input.
    """
    if isinstance(order, UnknownAxisOrder) and (order.mixes or (order.is_permuted and shape[2:])):
        return UnknownFeatureOrder(order.reason)
    if not isinstance(order, tuple):
        return None
    channels = image_axes(layer, len(shape)).index(0)
    positions = [p for axis, p in enumerate(order) if axis != channels and shape[axis] != 1]
    if positions == sorted(positions):
        return None
    return UnknownFeatureOrder(f"'{layer.name}' is on axes of {shape} that PyTorch has exchanged")


def _normalizes_groups(layer: Any, shape: Shape) -> bool:
    """Returns True for a normalization of groups of neighbours on the last axis."""
    if not isinstance(layer, keras.layers.GroupNormalization):
        return False
    return layer.groups not in (1, -1, shape[-1])


def _is_softmax_over_channels(layer: Any, order: AxisOrder) -> bool:
    """Returns True for a softmax over Keras's last axis, if it is not PyTorch's last axis."""
    function, name = layer, operation_name(layer)
    if isinstance(layer, (*IMAGE_LAYERS, keras.layers.Activation)):
        function = getattr(layer, "activation", None)
        name = getattr(function, "__name__", "")
    if not isinstance(function, keras.layers.Softmax) and not any(n in name for n in _SOFTMAX):
        return False
    axes = _axes(function, len(order))
    return len(order) - 1 in axes and len(axes) < len(order) and order[-1] != len(order) - 1


def _normalizes_some_axes(layer: Any, order: AxisOrder, shape: Shape) -> bool:
    """Returns True for a normalization of axes that are not PyTorch's last axes."""
    is_operation = any(name in operation_name(layer).replace("_", "") for name in _NORMALIZATIONS)
    if not is_operation and not isinstance(layer, LAST_AXES_LAYERS):
        return False
    positions = sorted(position for position, size in zip(order, shape, strict=True) if size != 1)
    normalized = {order[axis] for axis in _axes(layer, len(shape)) if shape[axis] != 1}
    return normalized != set(positions[len(positions) - len(normalized) :])


def _normalizes_last_channels(layer: Any, shape: Shape) -> bool:
    """Returns True for a normalization of channels that PyTorch needs on the first axis.

    A layer that contains convolutions is assumed to take and return images like a convolution.

    Args:
        layer: The layer or operation.
        shape: Shape of its input, whose axes PyTorch has in the same order.
    """
    if not isinstance(layer, keras.layers.Layer) or sum(size != 1 for size in shape) < 2:
        return False
    return not has_image_layers(layer) and any(
        isinstance(inner, FIRST_AXIS_LAYERS) and 0 not in _axes(inner, len(shape))
        for inner in _keras.layers.all_layers(layer)
    )


def _has_other_weights(layer: Any, order: AxisOrder, shape: Shape) -> bool:
    """Returns True for a custom layer whose weights may need another order of axes in PyTorch.

    A layer that contains convolutions is assumed to take and return images like a convolution.
    """
    if isinstance(layer, TracedOperation):
        return layer.table_axes > 1 and combines_entries_one_by_one(layer)
    if not isinstance(layer, keras.layers.Layer) or has_image_layers(layer):
        return False
    for inner in _keras.layers.all_layers(layer):
        sizes = [math.prod(weight.shape) for weight in _keras.layers.held_weights(inner)]
        if all(size == 1 for size in sizes):
            continue
        if not isinstance(inner, ORDER_PRESERVING_LAYERS):
            return True
        if inner is not layer and _normalizes_some_axes(inner, order, shape):
            return True
    return False


def has_own_convolution(layer: Any, shape: Shape) -> bool:
    """Returns True for a custom layer with a weight of three axes that is no table of positions."""
    if not isinstance(layer, keras.layers.Layer) or _keras.is_of_keras(type(layer), "call"):
        return False
    shapes = [tuple(weight.shape) for weight in _keras.layers.held_weights(layer)]
    return any(len(each) == 3 and each[1:] != shape for each in shapes)


def _axes(layer: Any, rank: int) -> set[int]:
    """Returns the numbers of the axes that a layer or operation sums over, without the batch.

    Args:
        layer: The layer or operation. A function uses the last axis.
        rank: Number of axes of its input without the batch.
    """
    axis = getattr(layer, "axis", -1)
    if axis is None:
        return set(range(rank))
    axes = [axis] if isinstance(axis, int) else list(axis)
    return {each + rank if each < 0 else each - 1 for each in axes} & set(range(rank))
