"""Orders of the features at the layers of a model, recorded one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.layer_groups import ORDER_PRESERVING_LAYERS
from tfwd.pretrained.flatten_order.orders import (
    FeatureOrder,
    FlattenedAxes,
    Shape,
    TensorOrder,
    UnknownFeatureOrder,
)


@dataclasses.dataclass
class LayerOrders:
    """Orders of the features that a layer takes and returns.

    Attributes:
        inputs: Order of the last axis of the inputs. None if PyTorch has the same.
        outputs: Order of the last axis of the outputs. None if PyTorch has the same.
    """

    inputs: FeatureOrder = None
    outputs: FeatureOrder = None


class OrderRecorder:
    """Recorder of the orders at each layer. Conflicting orders become unknown."""

    def __init__(self) -> None:
        self._orders: dict[int, LayerOrders] = {}
        self._recorded: set[tuple[int, str]] = set()

    def differing(self) -> dict[int, LayerOrders]:
        """Returns the orders that differ from PyTorch's, by the id of the layer."""
        return {
            key: orders for key, orders in self._orders.items() if orders.inputs or orders.outputs
        }

    def record(self, layer: Any, side: Literal["inputs", "outputs"], order: FeatureOrder) -> None:
        """Records the order of a layer's inputs or outputs."""
        orders = self._orders.setdefault(id(layer), LayerOrders())
        if (id(layer), side) in self._recorded and getattr(orders, side) != order:
            order = UnknownFeatureOrder("the model calls the layer on features in several orders")
        if order is not None or (side == "inputs" and isinstance(layer, keras.layers.Dense)):
            self._recorded.add((id(layer), side))
        setattr(orders, side, order)

    def record_inputs(
        self, layer: keras.layers.Layer, orders: Sequence[TensorOrder], shapes: Sequence[Shape]
    ) -> None:
        """Records the order of a layer's inputs at the layers inside that have weights on them.

        Args:
            layer: Layer without wrappers.
            orders: Orders of the inputs.
            shapes: Shapes of the inputs.
        """
        flattened = [
            order for order in orders if isinstance(order, (FlattenedAxes, UnknownFeatureOrder))
        ]
        order: FeatureOrder = None
        if flattened:
            is_same = len(set(flattened)) == 1 and len(flattened) == len(shapes)
            several = UnknownFeatureOrder(f"'{layer.name}' has several inputs")
            order = flattened[0] if is_same else several
        if rnns := _recurrent_layers(layer):
            for rnn in rnns:
                cells = getattr(rnn.cell, "cells", [rnn.cell])
                self.record(cells[0], "inputs", order)
        elif isinstance(layer, (keras.layers.Dense, *ORDER_PRESERVING_LAYERS)):
            self.record(layer, "inputs", order)
        elif flattened:
            reason = f"'{layer.name}' has flattened features as inputs"
            sizes = {shape[-1] for shape in shapes if shape}
            for inner in _keras.layers.all_layers(layer):
                weights = _keras.layers.held_weights(inner)
                if any(tuple(w.shape) and w.shape[0] in sizes for w in weights):
                    self.record(inner, "inputs", UnknownFeatureOrder(reason))


def _recurrent_layers(layer: keras.layers.Layer) -> list[Any]:
    """Returns the recurrent layers that take a layer's inputs."""
    if isinstance(layer, keras.layers.Bidirectional):
        return [layer.forward_layer, layer.backward_layer]
    return [layer] if isinstance(layer, keras.layers.RNN) else []
