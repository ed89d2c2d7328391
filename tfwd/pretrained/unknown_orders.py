"""Errors for weights on flattened features whose order in PyTorch is unknown or contradictory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import keras

from tfwd.pretrained.einsum_layouts import einsum_layout
from tfwd.pretrained.flatten_order.einsum_axes import axes_of_features, einsum_terms
from tfwd.pretrained.flatten_order.layer_groups import CONVOLUTIONS, ORDER_PRESERVING_LAYERS
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders, Side
from tfwd.pretrained.flatten_order.orders import (
    FeatureOrder,
    FlattenedAxes,
    JoinedFeatures,
    UnknownFeatureOrder,
)
from tfwd.pretrained.given_orders import OPTIONS, given_order
from tfwd.pretrained.key_rules import Key
from tfwd.pretrained.known_weights import (
    CELLS,
    feature_orders,
    feature_sides,
    has_known_use,
    is_in_einsum,
)
from tfwd.pretrained.target_variables import Target

_SHAPES: dict[Side, str] = {
    "inputs": "give the shape in PyTorch of the tensor that is flattened before the layer",
    "outputs": "give the shape in PyTorch of the image that the layer's outputs become",
}


def unknown_order(
    target: Target, key: Key, orders: LayerOrders, of_model: LayerOrders
) -> str | None:
    """Returns the error for an order that is unknown, or that the model contradicts; else None.

    Args:
        target: The variable.
        key: Its key in the mapping.
        orders: Orders of the features that the owner takes and returns.
        of_model: Orders that the model shows, without the key.
    """
    if error := _useless_option(target, key, of_model) or _wrong_shape(target, key, of_model):
        return error
    found = list(feature_orders(target, orders))
    for axis, (side, order) in enumerate(zip(feature_sides(target), found, strict=True)):
        if side and isinstance(order, FlattenedAxes) and not _fits(order, target, axis):
            if order is not of_model.of(side):
                advice = _SHAPES[side]
                if not has_known_use(target):  # another axis may have the features
                    advice = in_keras_order(target, key, of_model)
                return (
                    f"'{target.path}' is {target.shape}, but {OPTIONS[side]}="
                    f"{order.torch_shape} has {math.prod(order.shape)} entries: {advice}"
                )
            found[axis] = UnknownFeatureOrder(
                f"its {side} are several flattened images of {order.shape}"
            )
    if error := _unfit_parts(target, key, found, of_model):
        return error
    if error := _unclear_axis(target, key, found, of_model):
        return error
    if is_in_einsum(target) and isinstance(found[0], JoinedFeatures):
        terms = einsum_terms(target.owner)
        if terms.summed != [terms.kernel[0]]:
            found[0] = UnknownFeatureOrder("several tensors are joined before an einsum")
    unknown = {
        side: order
        for side, order in zip(feature_sides(target), found, strict=True)
        if side and isinstance(order, UnknownFeatureOrder)
    }
    if unknown:
        first = next(iter(unknown.values()))
        return _advice(target, key, unknown, of_model) + _other_features(first)
    return None


def _other_features(unknown: UnknownFeatureOrder) -> str:
    """Returns the advice if PyTorch may have other features here; "" for another reason."""
    if unknown.is_of_changed_features:
        return (
            ". But if PyTorch flattens before this operation, no order is right, because the "
            "result has other features: call Permute with the channels first before the model "
            "flattens"
        )
    if unknown.is_of_steps:
        return (
            ". But if PyTorch reshapes an image with the channels first here, its steps may have "
            "other features, and no order is right: call Permute with the channels first before "
            "the reshape"
        )
    return ""


def _useless_option(target: Target, key: Key, of_model: LayerOrders) -> str | None:
    """Returns the error for an option of a key that has no effect; None if there is none."""
    sides = feature_sides(target)
    if key.unflattened is not None and isinstance(target.owner, ORDER_PRESERVING_LAYERS):
        return (
            f"'{target.path}': unflattened= of Key({key.name!r}) has no effect on a "
            f"{type(target.owner).__name__}: give flattened= instead"
        )
    for side, option in OPTIONS.items():
        if getattr(key, option) and side in sides and not _can_reorder(target, side):
            return (
                f"'{target.path}' is {target.shape}, and {option}= reorders no such weight of a "
                f"{type(target.owner).__name__}: {in_keras_order(target, key, of_model)}"
            )
    is_vector = len(target.shape) == 1 and None not in sides
    given = (key.flattened, key.unflattened)
    if is_vector and None not in given and any(given):
        return (
            f"'{target.path}' has one axis: give flattened= or unflattened= of Key({key.name!r}), "
            "not both"
        )
    is_empty = key.flattened == () and key.unflattened is None
    is_about_outputs = of_model.inputs is None and of_model.outputs is not None
    if is_empty and is_about_outputs and "outputs" in sides:
        return (
            f"'{target.path}': Key({key.name!r}, flattened=()) is about the inputs, but the "
            "outputs of the layer become an image: give unflattened=() if PyTorch has the outputs "
            "in the same order"
        )
    return None


def _unfit_parts(
    target: Target, key: Key, found: Sequence[FeatureOrder], of_model: LayerOrders
) -> str | None:
    """Returns the error for orders that do not divide into the axes of a weight, or None."""
    inputs, outputs = found
    if isinstance(inputs, JoinedFeatures) and len(inputs.rows) != target.shape[0]:
        return (
            f"'{target.path}' is {target.shape}, and its {len(inputs.rows)} features are joined: "
            f"{in_keras_order(target, key, of_model)}"
        )
    if is_in_einsum(target) and einsum_layout(target, inputs, outputs) is None:
        return (
            f"'{target.path}' is {target.shape}, and PyTorch has no weight for a part of the axes "
            f"of an image: {in_keras_order(target, key, of_model)}"
        )
    return None


def _unclear_axis(
    target: Target, key: Key, found: Sequence[FeatureOrder], of_model: LayerOrders
) -> str | None:
    """Returns the error for a custom layer's weight with several axes of one size, or None.

    The code of the layer does not show which of the axes has the flattened features.
    """
    sizes = [math.prod(order.shape) for order in found if isinstance(order, FlattenedAxes)]
    is_clear = has_known_use(target) or key.transposed or not sizes
    if is_clear or max(map(target.shape.count, sizes)) < 2:
        return None
    return (
        f"'{target.path}' is {target.shape}, and the model does not show which of these axes has "
        f"the flattened features: {in_keras_order(target, key, of_model)}"
    )


def _advice(
    target: Target,
    key: Key,
    unknown: Mapping[Side, UnknownFeatureOrder],
    of_model: LayerOrders,
) -> str:
    """Returns the error for unknown orders, with the options that give them.

    Args:
        target, key: The variable and its key in the mapping.
        unknown: The unknown orders, by the side of the layer.
        of_model: Orders at the layer that the model shows.
    """
    first = next(iter(unknown.values()))
    start = f"'{target.path}': {first.reason}, and PyTorch flattens channels first"
    same = ", ".join(f"{OPTIONS[side]}=()" for side in unknown)
    if not all(_can_reorder(target, side) for side in unknown):
        return (
            f"{start}: map to Key({key.name!r}, {same}) if PyTorch has the axes in the same order; "
            f"otherwise {in_keras_order(target, key, of_model)}"
        )
    if len(unknown) > 1 and len(target.shape) == 1:
        return (
            f"{start}: map '{target.path}' to Key({key.name!r}, flattened=(channels, height, "
            "width)) if it belongs to the inputs, and with unflattened= if it belongs to the "
            "outputs; give () if PyTorch has the same order"
        )
    if len(unknown) == 1 and (options := _options_of(next(iter(unknown)), key, first, of_model)):
        return f"{start}{options}. Otherwise {in_keras_order(target, key, of_model)}"
    shapes = ", ".join(f"{OPTIONS[side]}=(channels, height, width)" for side in unknown)
    if len(target.shape) == 1:
        count = target.shape[0]
        return (
            f"{start}: map to Key({key.name!r}, {same}) if PyTorch has these {count} numbers in "
            f"the same order; or to Key(..., {shapes}) if they belong to an image of {count} "
            f"entries in PyTorch. Otherwise {in_keras_order(target, key, of_model)}"
        )
    return (
        f"{start}: map to Key({key.name!r}, {shapes}), the shape in PyTorch; or to Key(..., {same})"
        f" if PyTorch has the same order. Otherwise {in_keras_order(target, key, of_model)}"
    )


def _options_of(side: Side, key: Key, unknown: UnknownFeatureOrder, of_model: LayerOrders) -> str:
    """Returns the options that can give the order of one side; "" if the model shows no axes.

    Args:
        side: Side of the layer.
        key: Key of the variable in the mapping.
        unknown: The unknown order.
        of_model: Orders at the layer that the model shows.
    """
    option = OPTIONS[side]
    same = f"map to Key({key.name!r}, {option}=()) if PyTorch has"
    if unknown.has_no_shape or side in of_model.joined:
        return f": {same} the same order"
    parts = [part for part in of_model.parts.get(side, ()) if part.is_unknown]
    if len(parts) > 1:
        sizes = " and ".join(str(part.size) for part in parts)
        return (
            f". The model joins several parts of unknown order here, of {sizes} features: {same} "
            "all of them in Keras's order"
        )
    shape = parts[0].shape if parts else of_model.sizes.get(side, ())
    if len(shape) < 2:
        return ""
    channels_first = (shape[-1], *shape[:-1])
    here = f"in this part of {parts[0].size} features" if parts else "here"
    if given_order(channels_first, side, of_model).problem:  # such as a cube
        return f": {same} the axes of {shape} in Keras's order {here}, and not the channels first"
    in_keras = f"axes of {shape} {here}, as Keras has"
    if given_order(shape, side, of_model).problem:  # other axes may have these sizes too
        in_keras = f"the axes of {shape} in Keras's order {here}"
    elif unknown.is_of_combination:  # an axis may have flattened features
        in_keras = f"axes of {shape} {here}, with their entries in Keras's order"
    return (
        f": {same} {in_keras}; or to Key(..., {option}={channels_first}) if it has axes of "
        f"{channels_first}"
    )


def in_keras_order(target: Target, key: Key, of_model: LayerOrders, gates: str = "") -> str:
    """Returns the advice to write a tensor in Keras's order, with the options that state it.

    Args:
        target, key, of_model: As in `unknown_order`.
        gates: str. Keras's order of the gates, if the tensor has gates. Default "".
    """
    shown = [side for side in feature_sides(target) if side and of_model.of(side) is not None]
    options = "".join(f", {OPTIONS[side]}=()" for side in shown)
    return (
        f"write {target.shape} to the file in Keras's order of axes"
        f"{gates and f' and with the gates in the order {gates}'}, and map to Key({key.name!r}, "
        f"transposed=False{options})"
    )


def _can_reorder(target: Target, side: Side) -> bool:
    """Returns True if tfwd can reorder a weight on one side of its layer."""
    if is_in_einsum(target):
        return True
    if len(target.shape) > 2 or isinstance(target.owner, keras.layers.Embedding):
        return False
    is_of_features = isinstance(target.owner, (*CELLS, *ORDER_PRESERVING_LAYERS, *CONVOLUTIONS))
    return side == "inputs" or not is_of_features


def _wrong_shape(target: Target, key: Key, of_model: LayerOrders) -> str | None:
    """Returns the error for a shape in a key that the model contradicts; None without one."""
    for side, option in OPTIONS.items():
        given = getattr(key, option)
        if given is None or side not in feature_sides(target):
            continue
        if problem := given_order(given, side, of_model).problem:
            rest = (
                ""
                if problem.endswith("omit it")
                else f". Otherwise {in_keras_order(target, key, of_model)}"
            )
            return f"'{target.path}': {option}={given} of Key({key.name!r}) {problem}{rest}"
    return None


def missing_order(
    target: Target,
    key: Key,
    options: Mapping[Side | None, Sequence[int] | None],
    of_model: LayerOrders,
) -> str | None:
    """Returns the error for `transposed=False` on features that PyTorch has in another order.

    Args:
        target, key, of_model: As in `unknown_order`.
        options: Shapes that the mapping gives, by the side of the layer.
    """
    sides = feature_sides(target)
    is_either = len(target.shape) == 1 and None not in sides  # its only axis has one order
    if is_either and any(options[side] is not None for side in sides):
        return None
    for side in sides:
        shown = None if side is None else of_model.of(side)
        if side is None or options[side] is not None:
            continue
        start = f"'{target.path}': the model flattens an image here. Beside transposed=False, give"
        same = f"{OPTIONS[side]}=() if the file has the features in Keras's order"
        if isinstance(shown, JoinedFeatures):
            return f"{start} {same} in the key {key.name!r}"
        if isinstance(shown, FlattenedAxes):
            return (
                f"{start} {OPTIONS[side]}={shown.torch_shape} in the key {key.name!r} if the file "
                f"has the features in PyTorch's order; or {same}"
            )
        if isinstance(shown, UnknownFeatureOrder):
            advice = f"'{target.path}': {shown.reason}. In the key {key.name!r}, also give {same}"
            if _can_reorder(target, side):
                advice = f"{advice}. Otherwise, {_SHAPES[side]} as {OPTIONS[side]}="
            return advice + _other_features(shown)
    return None


def _fits(order: FlattenedAxes, target: Target, axis: int) -> bool:
    """Returns True if flattened axes are an axis of a weight, or the axes of an einsum kernel."""
    if not is_in_einsum(target):
        return math.prod(order.shape) == target.shape[axis]
    if target.name == "bias" or axis:
        return True  # `einsum_layout` compares them
    terms = einsum_terms(target.owner)
    size = dict(zip(terms.kernel, target.shape, strict=True))
    return axes_of_features(order, tuple(size[axis] for axis in terms.summed)) is not None
