"""Errors for variables whose layout in a PyTorch file is unknown."""

from __future__ import annotations

import math
from collections.abc import Sequence

import keras

from tfwd.pretrained.flatten_order.axes import same_order
from tfwd.pretrained.flatten_order.einsum_axes import axes_of_features, einsum_terms
from tfwd.pretrained.flatten_order.layer_groups import CONVOLUTIONS, ORDER_PRESERVING_LAYERS
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders, Side
from tfwd.pretrained.flatten_order.orders import (
    FlattenedAxes,
    JoinedFeatures,
    UnknownFeatureOrder,
    flattened_image,
)
from tfwd.pretrained.key_rules import Key
from tfwd.pretrained.target_variables import Target
from tfwd.pretrained.torch_layouts import (
    CELLS,
    MATRICES,
    einsum_layout,
    feature_orders,
    feature_sides,
    is_in_einsum,
    is_known_layout,
)


def unknown_layout(
    target: Target, key: Key, transposed: bool, orders: LayerOrders, of_model: LayerOrders
) -> str | None:
    """Returns the error for a variable whose layout is unknown; None if the layout is known.

    Args:
        target, transposed, orders: As in `layout_of`.
        key: Key of the variable, which may define `transposed` itself.
        of_model: Orders that the model shows, without the key.
    """
    if not transposed:
        return None
    if (
        error := _wrong_side(target, key, of_model)
        or _unknown_order(target, key, orders, of_model)
        or _contradiction(target, key, of_model)
    ):
        return error
    owner, shape, is_given = target.owner, target.shape, key.transposed is not None
    start = f"'{target.path}' belongs to a {type(owner).__name__}"
    if isinstance(owner, keras.layers.GRUCell) and not owner.reset_after:
        if is_given or target.name not in MATRICES:
            return None
        return (
            f"{start} with reset_after=False, whose formula differs from PyTorch's GRU: use "
            "reset_after=True"
        )
    if is_known_layout(target):
        return None
    if isinstance(owner, keras.layers.GRUCell) and len(shape) == 1:
        if is_given:
            return None
        return (
            f"{start}, and has {shape[0]} entries. If they belong to gates, PyTorch has the gates "
            "in another order: write the entries to the file in the order update, reset, new. Map "
            f"to Key({key.name!r}, transposed=False)"
        )
    if sum(size > 1 for size in shape) < 2:
        return None
    start += ", and tfwd does not know PyTorch's order of axes for this layer"
    if len(shape) != 2 or isinstance(owner, ORDER_PRESERVING_LAYERS):  # it has no outputs
        return (
            f"{start}: write {shape} to the file in Keras's order of axes, and map to "
            f"Key({key.name!r}, transposed=False)"
        )
    if is_given:
        return None
    return (
        f"{start}: map to Key({key.name!r}, transposed=True) if the file has the outputs first; "
        "otherwise map to Key(..., transposed=False)"
    )


def _unknown_order(
    target: Target, key: Key, orders: LayerOrders, of_model: LayerOrders
) -> str | None:
    """Returns the error for an unknown order of flattened features; None if the order is known."""
    sides, found = feature_sides(target), list(feature_orders(target, orders))
    in_keras = (
        f"write the tensor to the file in Keras's order of axes, and map to Key({key.name!r}, "
        "transposed=False)"
    )
    is_einsum = is_in_einsum(target)
    for side, option in _OPTIONS.items():
        if getattr(key, option) and side in sides and not _can_reorder(target, side):
            return (
                f"'{target.path}' is {target.shape}, and {option}= reorders no such weight of a "
                f"{type(target.owner).__name__}: {in_keras}"
            )
    for axis, order in enumerate(found):
        side = sides[axis]
        if side and isinstance(order, FlattenedAxes) and not _fits(order, target, axis):
            if order is not of_model.of(side):
                return (
                    f"'{target.path}' is {target.shape}, but {_OPTIONS[side]}="
                    f"{order.torch_shape} has {math.prod(order.shape)} entries: {_SHAPES[side]}"
                )
            found[axis] = UnknownFeatureOrder(
                f"its {side} are several flattened images of {order.shape}"
            )
    inputs, outputs = found
    if isinstance(inputs, JoinedFeatures) and len(inputs.rows) != target.shape[0]:
        return (
            f"'{target.path}' is {target.shape}, and its {len(inputs.rows)} features are joined: "
            f"{in_keras}"
        )
    if is_einsum and einsum_layout(target, inputs, outputs) is None:
        return (
            f"'{target.path}' is {target.shape}, and PyTorch has no weight for a part of the axes "
            f"of an image: {in_keras}"
        )
    if isinstance(inputs, JoinedFeatures) and is_einsum:
        terms = einsum_terms(target.owner)
        if terms.summed != [terms.kernel[0]]:
            inputs = UnknownFeatureOrder("several tensors are joined before an einsum")
    unknown = {
        side: order
        for side, order in zip(sides, (inputs, outputs), strict=True)
        if side and isinstance(order, UnknownFeatureOrder)
    }
    if not unknown:
        return None
    first = next(iter(unknown.values()))
    start = f"'{target.path}': {first.reason}, and PyTorch flattens channels first"
    same = ", ".join(f"{_OPTIONS[side]}=()" for side in unknown)
    if not all(_can_reorder(target, side) for side in unknown):
        return (
            f"{start}: map to Key({key.name!r}, {same}) if PyTorch has the axes in the same order; "
            f"otherwise {in_keras}"
        )
    if len(unknown) > 1 and len(target.shape) == 1:
        return (
            f"{start}: map '{target.path}' to Key({key.name!r}, flattened=(channels, height, "
            "width)) if it belongs to the inputs, and with unflattened= if it belongs to the "
            "outputs; give () if PyTorch has the same order"
        )
    if list(unknown) == ["inputs"] and first.shape:
        channels_first = (first.shape[-1], *first.shape[:-1])
        return (
            f"{start}: map to Key({key.name!r}, flattened=()) if PyTorch flattens axes of "
            f"{first.shape} here, as Keras does; or to Key(..., flattened={channels_first}) if it "
            f"flattens {channels_first}. Otherwise {in_keras}"
        )
    shapes = ", ".join(f"{_OPTIONS[side]}=(channels, height, width)" for side in unknown)
    rest = f". Otherwise {in_keras}" if "outputs" in unknown else ""
    return (
        f"{start}: map to Key({key.name!r}, {shapes}), the shape in PyTorch; or to Key(..., {same})"
        f" if PyTorch has the same order{rest}"
    )


_OPTIONS: dict[Side, str] = {"inputs": "flattened", "outputs": "unflattened"}
_SHAPES: dict[Side, str] = {
    "inputs": "give the shape in PyTorch of the tensor that is flattened before the layer",
    "outputs": "give the shape in PyTorch of the image that the layer's outputs become",
}


def _can_reorder(target: Target, side: Side) -> bool:
    """Returns True if tfwd can reorder a weight on one side of its layer."""
    if is_in_einsum(target):
        return True
    if len(target.shape) > 2 or isinstance(target.owner, keras.layers.Embedding):
        return False
    is_of_features = isinstance(target.owner, (*CELLS, *ORDER_PRESERVING_LAYERS, *CONVOLUTIONS))
    return side == "inputs" or not is_of_features


def _contradiction(target: Target, key: Key, of_model: LayerOrders) -> str | None:
    """Returns the error for an order that differs from what the model shows; None without one."""
    start = f"'{target.path}': the model shows that Key({key.name!r}, "
    for side, option in _OPTIONS.items():
        given, shown = getattr(key, option), of_model.of(side)
        is_known = isinstance(shown, (FlattenedAxes, JoinedFeatures))
        is_equal = is_known and given and same_order(flattened_image(given), shown)
        if not given or is_equal or side not in feature_sides(target):
            continue
        if isinstance(shown, UnknownFeatureOrder) and (expected := _other_axes(given, shown)):
            return (
                f"'{target.path}': Key({key.name!r}, {option}={given}) is for axes of {expected} "
                f"in Keras, but the model flattens {shown.shape}: give {option}=() if PyTorch "
                f"flattens {shown.shape} too. Otherwise write the tensor to the file in Keras's "
                f"order of axes, and map to Key({key.name!r}, transposed=False)"
            )
        if isinstance(shown, JoinedFeatures):
            return (
                f"{start}{option}={given}) is wrong, because it joins several tensors before the "
                "layer: omit it"
            )
        if isinstance(shown, FlattenedAxes):
            return (
                f"{start}{option}={given}) is not {shown.torch_shape}: give this shape, or omit it"
            )
    return None


def _other_axes(given: Sequence[int], shown: UnknownFeatureOrder) -> tuple[int, ...]:
    """Returns the axes in Keras of a given shape if the model flattens other ones, or ()."""
    order, shape = flattened_image(tuple(given)), shown.shape
    if order is None or not shape or math.prod(order.shape) != math.prod(shape):
        return ()
    # The positions may be one axis on one side, and several on the other.
    is_other = order.shape[-1] != shape[-1] or (
        len(order.shape) == len(shape) and order.shape != shape
    )
    return order.shape if is_other else ()


def _wrong_side(target: Target, key: Key, of_model: LayerOrders) -> str | None:
    """Returns the error for `flattened=()` that is about the outputs; None for other keys."""
    is_empty = key.flattened == () and key.unflattened is None
    is_about_outputs = of_model.inputs is None and of_model.outputs is not None
    if not is_empty or not is_about_outputs or "outputs" not in feature_sides(target):
        return None
    return (
        f"'{target.path}': Key({key.name!r}, flattened=()) is about the inputs, but the outputs of "
        "the layer become an image: give unflattened=() if PyTorch has the outputs in the same "
        "order"
    )


def _fits(order: FlattenedAxes, target: Target, axis: int) -> bool:
    """Returns True if flattened axes are an axis of a weight, or the axes of an einsum kernel."""
    if not is_in_einsum(target):
        return math.prod(order.shape) == target.shape[axis]
    if target.name == "bias" or axis:
        return True  # `einsum_layout` compares them
    terms = einsum_terms(target.owner)
    size = dict(zip(terms.kernel, target.shape, strict=True))
    return axes_of_features(order, tuple(size[axis] for axis in terms.summed)) is not None
