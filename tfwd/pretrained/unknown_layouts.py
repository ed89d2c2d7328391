"""Errors for variables whose layout in a PyTorch file is unknown."""

from __future__ import annotations

import math
import re

import keras

from tfwd.pretrained.flatten_order.axes import same_order
from tfwd.pretrained.flatten_order.einsum_axes import axes_of_features, einsum_terms
from tfwd.pretrained.flatten_order.layer_groups import ORDER_PRESERVING_LAYERS
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders
from tfwd.pretrained.flatten_order.orders import (
    FeatureOrder,
    FlattenedAxes,
    JoinedFeatures,
    UnknownFeatureOrder,
)
from tfwd.pretrained.key_rules import Key
from tfwd.pretrained.target_variables import Target
from tfwd.pretrained.torch_layouts import (
    CELLS,
    MATRICES,
    einsum_layout,
    feature_orders,
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
    if error := _wrong_recurrent_bias(target, key, transposed):
        return error
    if not transposed:
        return None
    if error := _unknown_order(target, key, orders, of_model) or _contradiction(
        target, key, orders.inputs, of_model.inputs
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


def _wrong_recurrent_bias(target: Target, key: Key, transposed: bool) -> str | None:
    """Returns the error for a bias of a recurrent layer in PyTorch's form; None without one."""
    owner = target.owner
    if not isinstance(owner, CELLS) or target.name != "bias" or key.transposed is False:
        return None
    written = f"to the file, and map to Key({key.name!r}, transposed=False)"
    is_gru = isinstance(owner, keras.layers.GRUCell)
    if re.split(r"[./]", key.name)[-1].startswith(("bias_ih", "bias_hh")):
        how = "stack them, with the gates in the order update, reset, new" if is_gru else "add them"
        return (
            f"'{target.path}' is one variable, and PyTorch has two biases, bias_ih and bias_hh: "
            f"{how}, write the result {written}"
        )
    if is_gru and transposed:
        return (
            f"'{target.path}' has its gates in another order in PyTorch: write the bias with the "
            f"gates in the order update, reset, new {written}"
        )
    return None


def _unknown_order(
    target: Target, key: Key, orders: LayerOrders, of_model: LayerOrders
) -> str | None:
    """Returns the error for an unknown order of flattened features; None if the order is known."""
    inputs, outputs = feature_orders(target, orders)
    if isinstance(inputs, FlattenedAxes) and key.flattened is None and not _fits(inputs, target):
        inputs = UnknownFeatureOrder(f"its inputs are several flattened images of {inputs.shape}")
    if isinstance(inputs, FlattenedAxes) and not _fits(inputs, target):
        return (
            f"'{target.path}' is {target.shape}, but Key({key.name!r}, flattened={key.flattened}) "
            f"has {math.prod(inputs.shape)} entries: give the shape in PyTorch of the tensor that "
            "is flattened before the layer"
        )
    if isinstance(inputs, JoinedFeatures) and len(inputs.rows) != target.shape[0]:
        return (
            f"'{target.path}' is {target.shape}, and its {len(inputs.rows)} features are joined: "
            f"write the tensor to the file in Keras's order, and map to Key({key.name!r}, "
            "transposed=False)"
        )
    rank, is_einsum = len(target.shape), is_in_einsum(target)
    if is_einsum and einsum_layout(target, inputs, outputs) is None:
        return (
            f"'{target.path}' is {target.shape}, and PyTorch has no weight for a part of the axes "
            "of an image: write the tensor to the file in Keras's order of axes, and map to "
            f"Key({key.name!r}, transposed=False)"
        )
    if isinstance(inputs, JoinedFeatures) and is_einsum:
        terms = einsum_terms(target.owner)
        if terms.summed != [terms.kernel[0]]:
            inputs = UnknownFeatureOrder("several tensors are joined before an einsum")
    if isinstance(orders.inputs, FlattenedAxes) and rank > 2 and not is_einsum:
        return (
            f"'{target.path}' is {target.shape}, and flattened= reorders only matrices and "
            "vectors: write the tensor to the file in Keras's order of axes, and map to "
            f"Key({key.name!r}, transposed=False)"
        )
    orders_of_axes = (inputs, outputs)
    unknown = next((o for o in orders_of_axes if isinstance(o, UnknownFeatureOrder)), None)
    if unknown is None:
        return None
    start = f"'{target.path}': {unknown.reason}, and PyTorch flattens channels first: "
    if unknown is orders.outputs:
        return (
            f"{start}write its features to the file in Keras's order of axes, and map to "
            f"Key({key.name!r}, transposed=False){_same_outputs(of_model)}"
        )
    # A shape describes only the inputs.
    is_both = isinstance(inputs, UnknownFeatureOrder) and isinstance(outputs, UnknownFeatureOrder)
    if is_both or (rank > 2 and not is_einsum):
        return (
            f"{start}map to Key({key.name!r}, flattened=()) if PyTorch has the axes in the same "
            "order; otherwise write the tensor to the file in Keras's order of axes, and map to "
            f"Key({key.name!r}, transposed=False)"
        )
    return (
        f"{start}map to Key({key.name!r}, flattened=(channels, height, width)), the shape in "
        "PyTorch; or to Key(..., flattened=()) if both flatten in the same order"
    )


def _same_outputs(of_model: LayerOrders) -> str:
    """Returns the advice for outputs that PyTorch has in the same order.

    Args:
        of_model: Orders at the layer that the model shows.
    """
    inputs = of_model.inputs
    if isinstance(inputs, FlattenedAxes):
        flattened = f"flattened={inputs.torch_shape}), the shape of its inputs in PyTorch,"
    elif inputs is None or inputs == of_model.outputs:
        flattened = "flattened=())"
    else:
        return ""
    return f"; or map to Key(..., {flattened} if PyTorch has the outputs in the same order"


def _contradiction(
    target: Target, key: Key, given: FeatureOrder, of_model: FeatureOrder
) -> str | None:
    """Returns the error for a `flattened` that differs from the shape that the model shows."""
    if not key.flattened or not isinstance(of_model, (FlattenedAxes, JoinedFeatures)):
        return None
    if same_order(given, of_model):
        return None
    start = f"'{target.path}': the model shows that Key({key.name!r}, flattened={key.flattened}) is"
    if isinstance(of_model, JoinedFeatures):
        return f"{start} wrong, because it joins several tensors before the layer: omit it"
    return f"{start} not {of_model.torch_shape}: give this shape, or omit it"


def _fits(inputs: FlattenedAxes, target: Target) -> bool:
    """Returns True if the axes of flattened features are the inputs of a kernel."""
    if not is_in_einsum(target):
        return math.prod(inputs.shape) == target.shape[0]
    terms = einsum_terms(target.owner)
    size = dict(zip(terms.kernel, target.shape, strict=True))
    return axes_of_features(inputs, tuple(size[axis] for axis in terms.summed)) is not None
