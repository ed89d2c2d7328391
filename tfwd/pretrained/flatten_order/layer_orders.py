"""Orders of the features at the layers of a model, recorded one after the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.einsum_axes import summed_features
from tfwd.pretrained.flatten_order.layer_groups import IMAGE_LAYERS, ORDER_PRESERVING_LAYERS
from tfwd.pretrained.flatten_order.orders import (
    FeatureOrder,
    FlattenedAxes,
    Shape,
    TensorOrder,
    UnknownAxisOrder,
    UnknownFeatureOrder,
    channels_last,
    flattened_axes,
    flattens_differently,
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
        is_dense = isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense))
        if order is not None or (side == "inputs" and is_dense):
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
        elif isinstance(layer, keras.layers.EinsumDense):
            self.record(layer, "inputs", summed_features(layer, orders[0], shapes[0]))
        elif isinstance(layer, (keras.layers.Dense, *ORDER_PRESERVING_LAYERS)):
            self.record(layer, "inputs", order)
        elif flattened:
            reason = f"'{layer.name}' has flattened features as inputs"
            sizes = {shape[-1] for shape in shapes if shape}
            for inner in _keras.layers.all_layers(layer):
                weights = _keras.layers.held_weights(inner)
                if any(tuple(w.shape) and w.shape[0] in sizes for w in weights):
                    self.record(inner, "inputs", UnknownFeatureOrder(reason))
        elif not _keras.is_of_keras(type(layer), "call") or isinstance(layer, keras.layers.Wrapper):
            self._record_flatten_inside(layer, orders, shapes)

    def _record_flatten_inside(
        self, layer: keras.layers.Layer, orders: Sequence[TensorOrder], shapes: Sequence[Shape]
    ) -> None:
        """Records the layers inside a custom layer that may take a flattened image.

        Args:
            layer: Layer without a graph.
            orders: Orders of the inputs.
            shapes: Shapes of the inputs.
        """
        inside = _keras.layers.all_layers(layer)
        images = [
            shape
            for order, shape in zip(orders, shapes, strict=True)
            if flattens_differently(order, shape)
            or (isinstance(order, UnknownAxisOrder) and sum(size != 1 for size in shape) > 1)
        ]
        for shape in images:
            reason = f"'{layer.name}' takes an image of {shape}, and may flatten it for this layer"
            self._record_features_of(shape, inside, reason)
        has_images = bool(images) or any(isinstance(inner, IMAGE_LAYERS) for inner in inside)
        self.record_unseen_flatten(inside, has_images)

    def record_unseen_flatten(self, layers: Sequence[Any], has_images: bool) -> None:
        """Records the layers that may take the output of a `Flatten` layer outside all graphs.

        Args:
            layers: Layers that are in no graph.
            has_images: bool. True if the `Flatten` layer may take the output of an image layer.
        """
        for layer in layers:
            if not isinstance(layer, keras.layers.Flatten):
                continue
            shape = tuple((_keras.layer_building.called_shape(layer) or ())[1:])
            if len(shape) < 2 or None in shape or not (has_images or len(shape) > 2):
                continue
            if flattened_axes(shape, channels_last(len(shape))):
                reason = f"'{layer.name}' flattens {shape}, maybe for this layer"
                self._record_features_of(shape, layers, reason)

    def record_unseen_features(
        self, order: TensorOrder, shape: Shape, layers: Sequence[Any]
    ) -> None:
        """Records the layers outside all graphs that may take the output of a graph.

        Args:
            order, shape: Order and shape of the output.
            layers: Layers that are in no graph.
        """
        if isinstance(order, (FlattenedAxes, UnknownFeatureOrder)):
            reason = f"a model inside returns flattened features of {shape}, maybe for this layer"
            self._record_features_of(shape[-1:], layers, reason)
        elif flattens_differently(order, shape):
            reason = f"a model inside returns an image of {shape}, maybe flattened for this layer"
            self._record_features_of(shape, layers, reason)

    def _record_features_of(self, shape: Shape, layers: Sequence[Any], reason: str) -> None:
        """Records an unknown order for layers with a weight on all entries of a tensor.

        Args:
            shape: Shape of the tensor.
            layers: Layers that may take the flattened tensor.
            reason: Why the order is unknown.
        """
        if None in shape:
            return
        for owner in layers:
            weights = _keras.layers.held_weights(owner)
            if any(tuple(weight.shape)[:1] == (math.prod(shape),) for weight in weights):
                self.record(owner, "inputs", UnknownFeatureOrder(reason))


def _recurrent_layers(layer: keras.layers.Layer) -> list[Any]:
    """Returns the recurrent layers that take a layer's inputs."""
    if isinstance(layer, keras.layers.Bidirectional):
        return [layer.forward_layer, layer.backward_layer]
    return [layer] if isinstance(layer, keras.layers.RNN) else []
