"""Order of a layer's output, from the orders of its inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras

from tfwd.pretrained.flatten_order.einsum_axes import einsum_output_order
from tfwd.pretrained.flatten_order.image_axes_rules import (
    has_own_convolution,
    order_after,
    order_of_positions,
)
from tfwd.pretrained.flatten_order.layer_groups import (
    ATTENTION_LAYERS,
    ATTENTION_WITHOUT_KERNELS,
    IMAGE_LAYERS,
    SEQUENCE_LAYERS,
    axes_of_positions,
    changes_examples,
    combines_entries_one_by_one,
    has_image_layers,
    image_axes,
    is_channels_first,
    is_concatenation,
    is_operation,
    is_reshape,
    keeps_axes_whole,
    makes_images,
    may_exchange_axes,
    permutes_like_a_function,
    weights_of,
)
from tfwd.pretrained.flatten_order.orders import (
    Shape,
    TensorOrder,
    UnknownAxisOrder,
    UnknownFeatureOrder,
    after_moved_image,
    common_order,
    first_unknown,
    flattens_differently,
    is_flattened,
    is_image,
    is_order_of_torch,
    is_vector,
    joined_features,
    may_be_image,
)
from tfwd.pretrained.flatten_order.reshape_rules import (
    flattened_order,
    order_across_examples,
    order_after_reshape,
    order_of_axes,
    permuted_order,
    unknown_permutation,
)
from tfwd.pretrained.flatten_order.traced_operations import TracedOperation


def output_order(
    layer: Any, orders: Sequence[TensorOrder], shapes: Sequence[Shape], result: Shape
) -> TensorOrder:
    """Returns the order of a layer's first output.

    Args:
        layer: Layer without wrappers, or operation of a graph.
        orders: Orders of the inputs.
        shapes: Shapes of the inputs.
        result: Shape of the output.
    """
    order = _output_order(layer, orders, shapes, result)
    return after_moved_image(order, result, orders, layer, reshapes=is_reshape(layer))


def _output_order(
    layer: Any, orders: Sequence[TensorOrder], shapes: Sequence[Shape], result: Shape
) -> TensorOrder:
    order, shape = orders[0], shapes[0]
    has_flattened = any(map(is_flattened, orders))
    if changes_examples(layer, shape, result):
        flattened = next(filter(is_flattened, orders), order)
        return order_across_examples(flattened, shape, result, layer)
    if isinstance(layer, TracedOperation) and layer.is_dense:
        return _dense_output_order(layer, order, shape, result)
    if isinstance(layer, TracedOperation) and layer.axes is not None:
        return order_of_axes(order, layer.axes, shape, result, layer.name)
    if makes_images(layer):
        if has_flattened and not weights_of(layer):
            reason = f"'{getattr(layer, 'name', '')}' changes flattened features"
            return UnknownFeatureOrder(reason) if is_channels_first(layer) else order
        if len(result) < 2:
            return None
        axes = axes_of_positions(layer, shape)
        if not weights_of(layer) and axes == 2 and not is_image(order):
            is_unknown = isinstance(order, UnknownAxisOrder) and not order.yields
            return order if is_unknown else _on_sequence(layer)
        if isinstance(layer, IMAGE_LAYERS) and (other := order_of_positions(layer, order, shape)):
            return UnknownAxisOrder(other.reason)
        if not weights_of(layer) and (elsewhere := _axes_elsewhere(layer, order, shape)):
            return elsewhere
        return order_after(layer, image_axes(layer, len(result)), result)
    if isinstance(layer, keras.layers.EinsumDense):
        return einsum_output_order(layer, order, shape, result)
    if isinstance(layer, SEQUENCE_LAYERS):
        name = getattr(layer, "name", "")
        if has_flattened and isinstance(layer, ATTENTION_WITHOUT_KERNELS):
            return UnknownFeatureOrder(f"'{name}' combines flattened features")
        images = filter(may_be_image, orders) if isinstance(layer, ATTENTION_LAYERS) else ()
        image = next(iter(images), None)
        if image is not None and len(result) > 1:
            reason = f"'{name}' is on the positions of an image"
            return image if isinstance(image, UnknownAxisOrder) else UnknownAxisOrder(reason)
        return tuple(range(len(result))) if len(result) > 1 else None
    if isinstance(layer, keras.layers.Dense):
        return _dense_output_order(layer, order, shape, result)
    if isinstance(layer, keras.layers.Flatten):
        return flattened_order(order, shape, layer.name, is_channels_first(layer))
    if isinstance(layer, keras.layers.RepeatVector) and has_flattened:
        return order
    if is_reshape(layer):
        return order_after_reshape(order, shape, result, layer.name)
    if isinstance(layer, keras.layers.Permute):
        if has_flattened:
            return UnknownFeatureOrder(f"'{layer.name}' changes flattened features")
        return permuted_order(order, [i - 1 for i in layer.dims], layer.name)
    if is_concatenation(layer):
        if has_flattened:
            unknown = UnknownFeatureOrder(f"'{layer.name}' joins flattened features with others")
            return joined_features(orders, shapes, result) or unknown
        if all(other == order for other in orders):
            return order_after(layer, order, result)
        if len(result) > 1 and any(map(is_image, orders)):
            return UnknownAxisOrder(f"'{layer.name}' joins an image with tensors of another order")
        return first_unknown(orders)
    if has_image_layers(layer) and is_image(order) and len(result) == len(shape):
        return order_after(layer, order, result)
    is_elementwise = result in shapes or combines_entries_one_by_one(layer)
    is_elementwise = is_elementwise and not may_exchange_axes(layer, result)
    if is_elementwise and _keeps_axes(layer, order):
        return _elementwise_output_order(layer, orders, shapes, result)
    if has_flattened:
        return UnknownFeatureOrder(f"'{layer.name}' changes flattened features")
    if len(result) > 1:
        return _other_axis_order(layer, orders, shapes, result)
    found = [
        _other_feature_order(layer, one, shape, result)
        for one, shape in zip(orders, shapes, strict=True)
        if result
    ]
    return next((one for one in found if one is not None), None)


def _keeps_axes(layer: Any, order: TensorOrder) -> bool:
    """Returns False for a layer with convolutions that may exchange axes.

    A layer with convolutions is assumed to return an image if it takes an image.
    """
    return not has_image_layers(layer) or not (order is None or is_order_of_torch(order))


def _axes_elsewhere(layer: Any, order: TensorOrder, shape: Shape) -> UnknownAxisOrder | None:
    """Returns the order after pooling or padding of other axes than Keras's of an image.

    PyTorch's model may pool each step of a sequence, or take the mean along an axis.
    """
    if isinstance(order, UnknownAxisOrder):
        return order if order.is_permuted or order.mixes else None
    if len(shape) < 3 or not isinstance(order, tuple) or order == image_axes(layer, len(shape)):
        return None
    return UnknownAxisOrder(f"'{layer.name}' is on axes that PyTorch's model may have elsewhere")


def _on_sequence(layer: Any) -> UnknownAxisOrder:
    """Returns the order after a pooling of a sequence, for which PyTorch's model may transpose."""
    return UnknownAxisOrder(f"'{layer.name}' is on a sequence", is_sequence=True)


def _dense_output_order(
    layer: keras.layers.Dense | TracedOperation, order: TensorOrder, shape: Shape, result: Shape
) -> TensorOrder:
    """Returns the order of the outputs of a `Dense` layer, which acts on the last axis."""
    if len(result) < 2:
        return None
    if is_image(order):  # PyTorch's layer needs the channels last
        reason = f"'{layer.name}' is on the channels of an image of {shape}"
        return UnknownAxisOrder(reason)
    if isinstance(order, UnknownAxisOrder) and not (order.is_sequence and len(result) < 3):
        return order
    return tuple(range(len(result)))


def _elementwise_output_order(
    layer: Any, orders: Sequence[TensorOrder], shapes: Sequence[Shape], result: Shape
) -> TensorOrder:
    """Returns the order of an output that combines the entries of its inputs one by one."""
    pairs = list(zip(orders, shapes, strict=True))
    same_shape = [order for order, shape in pairs if shape == result]
    if len(result) > 1 and not is_vector(result):
        # A vector of channels may be multiplied with an image in any order.
        same_shape = [
            o for o, s in pairs if is_flattened(o) or (len(s) == len(result) and not is_vector(s))
        ]
    order = common_order(
        same_shape,
        conflict=f"'{layer.name}' combines flattened features with others",
        of_axes=f"'{layer.name}' combines tensors in several orders of axes",
    )
    if is_flattened(order) and len(set(same_shape)) == 1 and not combines_entries_one_by_one(layer):
        return UnknownFeatureOrder(f"'{layer.name}' changes flattened features")
    return order_after(layer, order, result)


def _other_axis_order(
    layer: Any, orders: Sequence[TensorOrder], shapes: Sequence[Shape], result: Shape
) -> TensorOrder:
    """Returns the order of the axes that a custom layer or operation returns."""
    if has_image_layers(layer) and not any(map(is_image, orders)):
        return UnknownAxisOrder(f"'{layer.name}' has convolutions inside, and may return an image")
    has_units = _has_units(layer, result[-1])
    for order, shape in zip(orders, shapes, strict=True):
        if is_image(order):
            reason = f"'{layer.name}' changes the axes of an image of {shape}"
        elif isinstance(order, UnknownAxisOrder):
            reason = order.reason
        else:
            continue
        if not has_units and not keeps_axes_whole(layer, shape, result):
            return UnknownFeatureOrder(reason)
        return order if isinstance(order, UnknownAxisOrder) else UnknownAxisOrder(reason)
    if permutes_like_a_function(layer, shapes[0], result) and isinstance(orders[0], tuple):
        return unknown_permutation(layer.name)
    if has_own_convolution(layer, shapes[0]):
        return UnknownAxisOrder(f"'{layer.name}' is a custom layer, and may be a convolution")
    return None


def _other_feature_order(
    layer: Any, order: TensorOrder, shape: Shape, result: Shape
) -> TensorOrder:
    """Returns the order of the features that a custom layer or operation returns."""
    if has_image_layers(layer) and not _has_units(layer, result[0]):
        return UnknownFeatureOrder(
            f"'{layer.name}' has convolutions inside, and may flatten an image"
        )
    if None in shape or None in result or not shape or _has_units(layer, result[0]):
        return None  # a tensor of unknown length is not flattened to features
    if isinstance(order, UnknownAxisOrder) and order.mixes and result != shape[-1:]:
        return UnknownFeatureOrder(order.reason)
    # A custom layer may also pool. Global pooling returns a feature for each channel.
    may_flatten = result[0] != shape[-1] and not is_operation(layer)
    if math.prod(shape) != result[0] and not may_flatten:
        return None
    if isinstance(order, UnknownAxisOrder):
        is_one_axis = sum(size != 1 for size in shape) < 2
        return None if is_one_axis else UnknownFeatureOrder(order.reason)
    if not flattens_differently(order, shape):
        return None
    what = "flattens" if math.prod(shape) == result[0] else "may flatten a part of"
    return UnknownFeatureOrder(f"'{layer.name}' {what} {shape}")


def _has_units(layer: Any, count: int | None) -> bool:
    """Returns True if a weight has as many outputs as the layer, which then flattens nothing."""
    shapes = [tuple(weight.shape) for weight in weights_of(layer)]
    return any(len(shape) > 1 and shape[-1] == count for shape in shapes)
