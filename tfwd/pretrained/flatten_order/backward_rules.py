"""Order that a layer requires of its inputs, from the order that later layers require."""

from __future__ import annotations

import math
from typing import Any

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.einsum_axes import einsum_input_order, made_features
from tfwd.pretrained.flatten_order.image_axes_rules import order_after
from tfwd.pretrained.flatten_order.layer_groups import (
    CONCATENATION_LAYERS,
    DEPTHWISE_LAYERS,
    IMAGE_LAYERS,
    IMAGE_SEQUENCE_LAYERS,
    ORDER_PRESERVING_LAYERS,
    SEQUENCE_LAYERS,
    has_image_layers,
    image_axes,
    is_channels_first,
    is_reshape,
    may_reorder_entries,
    weights_of,
)
from tfwd.pretrained.flatten_order.layer_orders import OrderRecorder
from tfwd.pretrained.flatten_order.orders import (
    FlattenedAxes,
    Shape,
    TensorOrder,
    UnknownAxisOrder,
    UnknownFeatureOrder,
    flattens_differently,
    is_flattened,
)
from tfwd.pretrained.flatten_order.reshape_rules import (
    flattened_order,
    permuted_order,
    reshaped_order,
)


def required_input_order(
    layer: Any, required: TensorOrder, shape: Shape, result: Shape, recorder: OrderRecorder
) -> TensorOrder:
    """Returns the order that a layer requires of an input. Records the order of its outputs.

    Args:
        layer: Layer without wrappers, or operation of a graph.
        required: Order that later layers require of the output.
        shape, result: Shapes of the input and of the output.
        recorder: Gets the order if the layer has weights along the output.
    """
    features = required if isinstance(required, (FlattenedAxes, UnknownFeatureOrder)) else None
    if isinstance(layer, (*IMAGE_LAYERS, *IMAGE_SEQUENCE_LAYERS)):
        if features is not None and weights_of(layer):
            _record_unknown_outputs(layer, recorder)
        if features is not None and _keeps_channels(layer):
            return _changed_features(layer)
        return image_axes(layer, len(shape)) if len(shape) > 1 else None
    if isinstance(layer, keras.layers.Dense):
        recorder.record(layer, "outputs", features, is_backward=True)
        if len(shape) < 2:
            return None
        if flattens_differently(required, result):
            reason = f"'{layer.name}' is on the channels of an image of {result}"
            return UnknownAxisOrder(reason)
        if isinstance(required, UnknownAxisOrder) and not required.is_sequence:
            return required
        return tuple(range(len(shape)))
    if isinstance(layer, keras.layers.EinsumDense):
        if features is not None:
            _record_unknown_outputs(layer, recorder)
            return tuple(range(len(shape))) if len(shape) > 1 else None
        made = made_features(layer, required, result)
        recorder.record(layer, "outputs", made, is_backward=True)
        return einsum_input_order(layer, required, shape, result)
    if isinstance(layer, keras.layers.Flatten) and features is not None:
        return _flattened_input_order(layer, features, shape)
    if is_reshape(layer):
        if len(shape) == 1 and len(result) > 1:
            return flattened_order(required, result, layer.name)
        return reshaped_order(required, result, shape, layer.name)
    if isinstance(layer, keras.layers.Permute):
        if features is not None:
            return _changed_features(layer)
        axes = [layer.dims.index(i + 1) for i in range(len(shape))]
        return permuted_order(required, axes, layer.name)
    if isinstance(layer, SEQUENCE_LAYERS) and len(shape) > 1:
        if features is not None:
            _record_unknown_outputs(layer, recorder)
        return tuple(range(len(shape)))
    if isinstance(layer, CONCATENATION_LAYERS):
        if features is None:
            return required
        return UnknownFeatureOrder(
            f"'{layer.name}' joins the outputs with others, before they become an image"
        )
    if shape == result and isinstance(layer, ORDER_PRESERVING_LAYERS):
        recorder.record(layer, "inputs", features, is_backward=True)
        return order_after(layer, required, shape)
    has_weights = bool(weights_of(layer))
    is_kept = not has_weights or isinstance(required, (tuple, UnknownAxisOrder))
    if shape == result and not may_reorder_entries(layer) and is_kept:
        return order_after(layer, required, shape)
    if features is not None and has_weights:
        _record_unknown_outputs(layer, recorder)
    elif features is not None and shape and math.prod(size or 0 for size in shape) != 1:
        return _changed_features(layer)
    if len(shape) > 1 and has_image_layers(layer):
        return UnknownAxisOrder(f"'{layer.name}' has convolutions inside, and may take an image")
    if len(shape) == 1:
        return _required_features(layer, required, shape, result)
    if isinstance(required, UnknownAxisOrder) or flattens_differently(required, result):
        return UnknownAxisOrder(f"'{layer.name}' makes an image of {result}")
    return None


def _keeps_channels(layer: Any) -> bool:
    """Returns True for an image layer whose outputs have the channels of its inputs."""
    return not weights_of(layer) or isinstance(layer, DEPTHWISE_LAYERS)


def _flattened_input_order(
    layer: keras.layers.Flatten, features: TensorOrder, shape: Shape
) -> TensorOrder:
    """Returns the order that is required before a `Flatten`, from the order of the features."""
    is_known = not is_channels_first(layer)
    if isinstance(features, FlattenedAxes) and features.shape == shape and is_known:
        return features.positions
    return _changed_features(layer)


def _required_features(
    layer: Any, required: TensorOrder, shape: Shape, result: Shape
) -> UnknownFeatureOrder | None:
    """Returns the unknown order of features that a custom layer or operation makes an image of."""
    inside = _keras.layers.all_layers(layer) if has_image_layers(layer) else ()
    for inner in inside:
        target = inner.target_shape if isinstance(inner, keras.layers.Reshape) else ()
        if len(target) > 1 and -1 not in target and (math.prod(target),) == shape:
            return UnknownFeatureOrder(f"'{inner.name}' makes an image of {tuple(target)}")
    if None in shape or None in result or math.prod(shape) != math.prod(result):
        return None
    if isinstance(required, UnknownAxisOrder):
        return UnknownFeatureOrder(required.reason)
    if flattens_differently(required, result):
        return UnknownFeatureOrder(f"'{layer.name}' makes an image of {result}")
    return None


def required_beside_flattened(
    layer: Any,
    required: list[TensorOrder],
    orders: list[TensorOrder],
    shapes: list[Shape],
    result: Shape,
) -> list[TensorOrder]:
    """Returns the orders required of a layer's inputs, some of which are flattened images.

    An example is the sum of a flattened image and the outputs of a `Dense` layer. These outputs
    are in PyTorch's order, so they do not fit the image.

    Args:
        layer: Layer without wrappers, or operation of a graph.
        required: Orders that the layer requires of its inputs without this rule.
        orders: Orders of the inputs in the forward pass.
        shapes: Shapes of the inputs.
        result: Shape of the output.
    """
    if isinstance(layer, CONCATENATION_LAYERS) or may_reorder_entries(layer):
        return required
    name = getattr(layer, "name", "")
    unknown = UnknownFeatureOrder(f"'{name}' combines the outputs with flattened features")
    flattened = list(filter(is_flattened, orders))
    return [
        unknown if shape == result and order not in flattened and later not in flattened else later
        for later, order, shape in zip(required, orders, shapes, strict=True)
    ]


def _changed_features(layer: Any) -> UnknownFeatureOrder:
    """Returns the unknown order before a layer that reorders features of a later image."""
    name = getattr(layer, "name", "")
    return UnknownFeatureOrder(f"'{name}' changes the features before they become an image")


def _record_unknown_outputs(layer: Any, recorder: OrderRecorder) -> None:
    """Records that the order of the outputs of a layer with weights is unknown."""
    reason = f"its outputs become an image after '{layer.name}'"
    for inner in _keras.layers.all_layers(layer):
        recorder.record(inner, "outputs", UnknownFeatureOrder(reason), is_backward=True)
