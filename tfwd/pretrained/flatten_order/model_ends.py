"""Tensors at the inputs and outputs of models: their shapes, and the orders of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfwd import _keras
from tfwd.pretrained.flatten_order.orders import (
    Shape,
    TensorOrder,
    UnknownAxisOrder,
    channels_last,
    flattened_axes,
    is_flattened,
    is_order_of_torch,
)


def input_order(tensor: Any, required: TensorOrder) -> TensorOrder:
    """Returns the order of an input of a model. With three axes, it may be an image."""
    shape = shape_of(tensor)
    is_shown = required is not None and not is_flattened(required)
    if is_shown and len(shape) > 1 and not (len(shape) > 2 and is_order_of_torch(required)):
        return required
    if len(shape) < 3 or not flattened_axes(shape, channels_last(len(shape))):
        return None
    reason = f"the model does not show what the axes of {shape}, its input, are"
    return UnknownAxisOrder(reason, yields=True, is_sequence=True)


def _is_shape(shape: Any) -> bool:
    """Returns True for a sequence of sizes, which may be None."""
    return isinstance(shape, (tuple, list)) and all(
        size is None or isinstance(size, int) for size in shape
    )


def takes_image(model: Any) -> bool:
    """Returns True if the inputs of a model have three axes, and may therefore be images."""
    shape = _keras.layer_building.called_shape(model)
    return isinstance(shape, tuple) and len(shape) > 3


def shapes_at_ends(model: Any, graphs: Sequence[tuple[str, Any, Any]]) -> list[Shape]:
    """Returns the shapes of the tensors that a model takes, and that graphs inside return."""
    shape = _keras.layer_building.called_shape(model)
    given = shape if isinstance(shape, list) else [shape]
    shapes = [tuple(each)[1:] for each in given if _is_shape(each)]
    return [*shapes, *(shape_of(tensor) for _, graph, _ in graphs for tensor in graph.outputs)]


def shape_of(tensor: Any) -> Shape:
    """Returns the shape without the first axis; empty if the number of axes is unknown."""
    shape = tensor.shape
    return () if getattr(shape, "rank", 0) is None else tuple(shape)[1:]
