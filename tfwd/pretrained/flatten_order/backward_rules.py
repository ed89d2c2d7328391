"""Order that a layer requires of its inputs, from the order that later layers require."""

from __future__ import annotations

import math
from typing import Any

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.einsum_axes import einsum_input_order, made_features
from tfwd.pretrained.flatten_order.image_axes_rules import order_after
from tfwd.pretrained.flatten_order.layer_groups import (
    ATTENTION_WITHOUT_KERNELS,
    DEPTHWISE_LAYERS,
    ORDER_PRESERVING_LAYERS,
    SEQUENCE_LAYERS,
    axes_of_positions,
    changes_examples,
    combines_entries_one_by_one,
    has_image_layers,
    image_axes,
    is_channels_first,
    is_concatenation,
    is_reshape,
    keeps_axes_whole,
    makes_images,
    may_exchange_axes,
    permutes_like_a_function,
    reorders_channels,
    weights_of,
)
from tfwd.pretrained.flatten_order.layer_orders import OrderRecorder
from tfwd.pretrained.flatten_order.orders import (
    FlattenedAxes,
    Shape,
    TensorOrder,
    UnknownAxisOrder,
    UnknownFeatureOrder,
    after_moved_image,
    channels_last,
    flattened_axes,
    is_flattened,
    is_image,
    is_order_of_torch,
    is_vector,
    may_be_image,
)
from tfwd.pretrained.flatten_order.reshape_rules import (
    flattened_order,
    order_across_examples,
    permuted_order,
    reshaped_order,
    unknown_permutation,
)
from tfwd.pretrained.flatten_order.traced_operations import TracedOperation


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
    order = _required_input_order(layer, required, shape, result, recorder)
    return after_moved_image(order, shape, [required], layer, reshapes=is_reshape(layer))


def _required_input_order(
    layer: Any, required: TensorOrder, shape: Shape, result: Shape, recorder: OrderRecorder
) -> TensorOrder:
    features: Any = required if is_flattened(required) else None
    if changes_examples(layer, shape, result):
        return order_across_examples(required, result, shape, layer)
    if isinstance(layer, TracedOperation) and layer.axes is not None and features is None:
        if is_vector(result):
            return None
        if len(result) > 1 and sorted(layer.axes) == list(range(len(shape))):
            before = [layer.axes.index(axis) for axis in range(len(shape))]
            return permuted_order(required, before, layer.name)
    if reorders_channels(layer, shape, result):
        name = layer.name
        return UnknownFeatureOrder(f"'{name}' has the channels in another order in PyTorch")
    if makes_images(layer):
        if features is not None and weights_of(layer):
            _record_unknown_outputs(layer, recorder, features)
        if features is not None and _keeps_channels(layer):
            return _changed_features(layer)
        if (
            axes_of_positions(layer, shape) == 2
            and not weights_of(layer)
            and not is_image(required)
        ):
            if isinstance(required, UnknownAxisOrder):
                return required
            reason = f"'{getattr(layer, 'name', '')}' is on a sequence"
            return UnknownAxisOrder(reason, yields=True, is_sequence=True)
        return image_axes(layer, len(shape)) if len(shape) > 1 else None
    if isinstance(layer, keras.layers.Dense):
        recorder.record(layer, "outputs", features, is_backward=True)
        if len(shape) < 2:
            return None
        if is_image(required):
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
    if isinstance(layer, keras.layers.RepeatVector) and features is not None:
        return features
    if is_reshape(layer):
        if not shape:  # a size
            return None
        if len(shape) == 1 and len(result) > 1:
            # A layer on the last axis shows where PyTorch has the channels then, not before.
            is_shown = len(result) < 3 or not is_order_of_torch(required)
            return flattened_order(required if is_shown else None, result, layer.name)
        return reshaped_order(required, result, shape, layer.name)
    if isinstance(layer, keras.layers.Permute):
        if features is not None:
            return _changed_features(layer)
        axes = [layer.dims.index(i + 1) for i in range(len(shape))]
        return permuted_order(required, axes, layer.name)
    if isinstance(layer, SEQUENCE_LAYERS) and len(shape) > 1:
        if features is not None:
            _record_unknown_outputs(layer, recorder)
            if isinstance(layer, ATTENTION_WITHOUT_KERNELS):
                return _changed_features(layer)
        return tuple(range(len(shape)))
    if is_concatenation(layer):
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
    if shape == result and not may_exchange_axes(layer, shape) and is_kept:
        return order_after(layer, required, shape)
    if features is not None and has_weights:
        _record_unknown_outputs(layer, recorder)
    elif features is not None and shape and math.prod(size or 0 for size in shape) != 1:
        return _changed_features(layer)
    if len(shape) > 1 and has_image_layers(layer):
        return UnknownAxisOrder(f"'{layer.name}' has convolutions inside, and may take an image")
    if len(shape) == 1:
        made = _required_features(layer, required, shape, result)
        owners = _owners_of_outputs(layer, result) if made is not None else []
        for owner in owners:
            recorder.record(owner, "outputs", made, is_backward=True)
        return None if owners else made
    if permutes_like_a_function(layer, shape, result) and isinstance(required, tuple) and result:
        return unknown_permutation(layer.name)
    if not may_be_image(required) or not len(result):
        return None
    reason = f"'{layer.name}' makes an image of {result}"
    is_whole = len(result) > 1 and keeps_axes_whole(layer, result, shape)
    return UnknownAxisOrder(reason) if is_whole else UnknownFeatureOrder(reason)


def _keeps_channels(layer: Any) -> bool:
    """Returns True for an image layer whose outputs have the channels of its inputs."""
    return not weights_of(layer) or isinstance(layer, DEPTHWISE_LAYERS)


def _flattened_input_order(
    layer: keras.layers.Flatten, features: TensorOrder, shape: Shape
) -> TensorOrder:
    """Returns the order that is required before a `Flatten`, from the order of the features."""
    if isinstance(features, UnknownFeatureOrder):
        return features
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
    if None in result or len(result) < 2:
        return None
    rows = [weight.shape[0] for weight in weights_of(layer) if len(weight.shape) == 2]
    if has_image_layers(layer) and shape[0] not in rows:
        return UnknownFeatureOrder(f"'{layer.name}' may make an image of them")
    if result[-1] == shape[0]:
        return None
    may_be_made = len(result) > 2 and flattened_axes(result, channels_last(len(result)))
    if not may_be_image(required) and not may_be_made:
        return None
    reason = f"'{layer.name}' makes an image of {result}"
    return UnknownFeatureOrder(getattr(required, "reason", reason))


def _owners_of_outputs(layer: Any, result: Shape) -> list[Any]:
    """Returns the layers inside a custom layer whose outputs may become all entries of a result."""
    if not weights_of(layer):
        return []
    return [
        inner
        for inner in _keras.layers.all_layers(layer)
        for weight in _keras.layers.held_weights(inner)
        if len(weight.shape) == 2 and weight.shape[-1] == math.prod(result)
    ]


def required_beside_flattened(
    layer: Any,
    required: list[TensorOrder],
    orders: list[TensorOrder],
    shapes: list[Shape],
    result: Shape,
    weighted: list[bool],
) -> list[TensorOrder]:
    """Returns the orders required of a layer's inputs, some of which are flattened images.

    An example is the sum of a flattened image and the outputs of a `Dense` layer. These outputs
    are in PyTorch's order, so they do not fit the image. An input of the model that does not fit
    has no weights whose order is unknown. The weights of the image then count as unknown.

    Args:
        layer: Layer without wrappers, or operation of a graph.
        required: Orders that the layer requires of its inputs without this rule.
        orders: Orders of the inputs in the forward pass.
        shapes: Shapes of the inputs.
        result: Shape of the output.
        weighted: For each input, True if it depends on weights.
    """
    if is_concatenation(layer) and all(shape[-1:] != result[-1:] for shape in shapes):
        return required  # it joins the features
    name = getattr(layer, "name", "")
    unknown = UnknownFeatureOrder(f"'{name}' combines the outputs with flattened features")
    flattened = list(filter(is_flattened, orders))
    pairs = list(zip(orders, shapes, strict=True))
    sizes = {size for order, shape in pairs if is_flattened(order) for size in shape[-1:]} - {1}
    differs = [
        (shape == result or not sizes.isdisjoint(shape))
        and order not in flattened
        and later not in flattened
        for later, (order, shape) in zip(required, pairs, strict=True)
    ]
    is_input = any(d and not w for d, w in zip(differs, weighted, strict=True))
    if is_input or len(set(flattened)) > 1:
        differs = [d or is_flattened(order) for d, order in zip(differs, orders, strict=True)]
    return [unknown if d else later for d, later in zip(differs, required, strict=True)]


def required_beside_image(
    layer: Any,
    required: list[TensorOrder],
    orders: list[TensorOrder],
    shapes: list[Shape],
    result: Shape,
    order: TensorOrder,
) -> list[TensorOrder]:
    """Returns the orders required of a layer's inputs, whose sum or other merge is an image.

    Args:
        layer: Layer without wrappers, or operation of a graph.
        required: Orders that the layer requires of its inputs without this rule.
        orders: Orders of the inputs in the forward pass. None if features were reshaped.
        shapes: Shapes of the inputs.
        result: Shape of the output.
        order: Order of the output in the forward pass.
    """
    merges = is_concatenation(layer) or combines_entries_one_by_one(layer) or result in shapes
    is_weak = isinstance(order, UnknownAxisOrder) and order.yields
    if len(shapes) < 2 or not merges or is_weak or not may_be_image(order):
        return required
    text = f"'{getattr(layer, 'name', '')}' combines tensors in several orders of axes"
    unknown = UnknownAxisOrder(text)

    def of_input(later: TensorOrder, before: TensorOrder, shape: Shape) -> TensorOrder:
        has_order = len(shape) > 1 and not is_vector(shape) and shape[-1] != 1
        is_made = before is None and later != order and not is_image(later)
        return unknown if has_order and is_made else later

    return list(map(of_input, required, orders, shapes))


def _changed_features(layer: Any) -> UnknownFeatureOrder:
    """Returns the unknown order before a layer that reorders features of a later image."""
    name = getattr(layer, "name", "")
    return UnknownFeatureOrder(f"'{name}' changes the features before they become an image")


def _record_unknown_outputs(
    layer: Any, recorder: OrderRecorder, features: TensorOrder = None
) -> None:
    """Records that the order of the outputs of a layer with weights is unknown."""
    reason = getattr(features, "reason", f"its outputs become an image after '{layer.name}'")
    for inner in _keras.layers.all_layers(layer):
        recorder.record(inner, "outputs", UnknownFeatureOrder(reason), is_backward=True)
