"""Errors for variables whose layout in a PyTorch file is unknown."""

from __future__ import annotations

import keras

from tfwd.pretrained.flatten_order.layer_groups import ORDER_PRESERVING_LAYERS
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders
from tfwd.pretrained.key_rules import Key
from tfwd.pretrained.known_weights import (
    MATRICES,
    WITH_GATES,
    is_convolutional_lstm,
    is_known_layout,
    is_table,
)
from tfwd.pretrained.target_variables import Target
from tfwd.pretrained.unknown_orders import in_keras_order, unknown_order

TRANSPOSED_TABLE = "write the transposed table to the file if the file has the features first"


def unknown_layout(
    target: Target, key: Key, orders: LayerOrders, of_model: LayerOrders
) -> str | None:
    """Returns the error for a variable whose layout is unknown; None if the layout is known.

    Args:
        target, orders: As in `layout_of`.
        key: Key of the variable, which may define `transposed` itself.
        of_model: Orders that the model shows, without the key.
    """
    if error := unknown_order(target, key, orders, of_model):
        return error
    owner, shape, is_given = target.owner, target.shape, key.transposed is not None
    start = f"'{target.path}' belongs to a {type(owner).__name__}"
    if isinstance(owner, keras.layers.GRUCell) and not owner.reset_after:
        if is_given or target.name not in MATRICES:
            return None
        return (
            f"{start} with reset_after=False, whose formula differs from torch.nn.GRU: use "
            "reset_after=True for a file of torch.nn.GRU. For another GRU, write the tensor to the "
            f"file like Keras's GRU, and map to Key({key.name!r}, transposed=False)"
        )
    if is_table(target) and key.transposed and shape[0] == shape[1]:
        return (
            f"'{target.path}' is the table of an Embedding, which has its rows first in PyTorch "
            f"and in Keras, so transposed=True has no effect: {TRANSPOSED_TABLE}; otherwise leave "
            "out transposed=True"
        )
    if is_known_layout(target):
        return None
    if is_convolutional_lstm(target):
        if is_given and len(shape) == 1:
            return None
        advice = in_keras_order(target, key, of_model, "input, forget, cell, output")
        return f"{start}, which PyTorch does not have: {advice}"
    if isinstance(owner, WITH_GATES) and len(shape) == 1:
        if is_given:
            return None
        return (
            f"{start}, and has {shape[0]} entries. If they belong to gates, PyTorch may have the "
            "gates in another order: write the entries to the file in the order of the class. Map "
            f"to Key({key.name!r}, transposed=False)"
        )
    if sum(size > 1 for size in shape) < 2:
        return None
    start += ", and tfwd does not know PyTorch's order of axes for this layer"
    if len(shape) != 2 or isinstance(owner, ORDER_PRESERVING_LAYERS):  # it has no outputs
        return f"{start}: {in_keras_order(target, key, of_model)}"
    if is_given:
        return None
    if isinstance(owner, WITH_GATES) or type(owner).__name__.endswith(("GRU", "LSTM")):
        start += ", nor the order of its gates: write the gates in the order of the class"
    return (
        f"{start}: map to Key({key.name!r}, transposed=True) if the file has the axes exchanged, "
        "as PyTorch has the axes of a Dense kernel; otherwise map to Key(..., transposed=False)"
    )
