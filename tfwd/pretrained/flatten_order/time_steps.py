"""Orders of the layer inside a `TimeDistributed`, which takes one time step of a tensor."""

from __future__ import annotations

from collections.abc import Callable

import keras

from tfwd.pretrained.flatten_order.layer_groups import unwrapped
from tfwd.pretrained.flatten_order.orders import (
    Shape,
    TensorOrder,
    UnknownAxisOrder,
    UnknownFeatureOrder,
    first_unknown,
    is_flattened,
)


def for_one_time_step(
    function: Callable[..., list[TensorOrder]],
    layer: keras.layers.TimeDistributed,
    orders: list[TensorOrder],
    shapes: list[Shape],
    results: list[Shape],
) -> list[TensorOrder]:
    """Returns the orders that a function finds for the layer inside a `TimeDistributed`.

    Args:
        function: `_layer_forward` or `_layer_backward`.
        layer: The wrapper.
        orders: Orders that the function takes, with the axis of time.
        shapes, results: Shapes of the wrapper's inputs and outputs.
    """
    inner = unwrapped(layer.layer)
    if isinstance(inner, keras.layers.Dense):  # it acts on the last axis, also without the wrapper
        return function(inner, orders, shapes, results)
    found = function(
        inner,
        [without_time(order) for order in orders],
        [shape[1:] for shape in shapes],
        [shape[1:] for shape in results],
    )
    if any(isinstance(order, tuple) and order[:1] != (0,) for order in orders):
        # PyTorch has another axis first, so its model cannot run the layer on steps of this one.
        reason = f"'{layer.name}' runs its layer along an axis of an image"
        return [
            UnknownFeatureOrder(reason) if is_flattened(order) else UnknownAxisOrder(reason)
            for order in found
        ]
    return [with_time(order) or first_unknown(orders) for order in found]


def without_time(order: TensorOrder) -> TensorOrder:
    """Returns the order of one time step of a tensor, which `TimeDistributed` passes on."""
    if not isinstance(order, tuple):
        return order
    in_torch = sorted(position for position in order[1:] if position >= 0)
    return type(order)(in_torch.index(p) if p >= 0 else -1 for p in order[1:])


def with_time(order: TensorOrder) -> TensorOrder:
    """Returns the order of a tensor, from the order of one of its time steps."""
    if not isinstance(order, tuple):
        return order
    return type(order)((0, *(position + 1 if position >= 0 else -1 for position in order)))
