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

Side = Literal["inputs", "outputs"]


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

    def record(self, layer: Any, side: Side, order: FeatureOrder) -> None:
        """Records the order of a layer's inputs or outputs."""
        orders = self._orders.setdefault(id(layer), LayerOrders())
        before = getattr(orders, side)
        if isinstance(before, UnknownFeatureOrder):
            return
        is_recorded = (id(layer), side) in self._recorded
        if is_recorded and before != order and not isinstance(order, UnknownFeatureOrder):
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
            self.record_unseen("inputs", shape, inside, reason)
        has_images = bool(images) or any(isinstance(inner, IMAGE_LAYERS) for inner in inside)
        for side, shape, reason in unseen_images(inside, has_images):
            self.record_unseen(side, shape, inside, reason)

    def record_unseen(self, side: Side, shape: Shape, layers: Sequence[Any], reason: str) -> None:
        """Records an unknown order for layers with a weight on all entries of a tensor.

        Args:
            side: "inputs" if the layer may take the tensor, "outputs" if it may return the tensor.
            shape: Shape of the tensor.
            layers: Layers outside all graphs, or in a custom layer.
            reason: Why the order is unknown.
        """
        if None in shape:
            return
        axis = 0 if side == "inputs" else -1
        for owner in layers:
            shapes = [tuple(weight.shape) for weight in _keras.layers.held_weights(owner)]
            if any(each and each[axis] == math.prod(shape) for each in shapes):
                self.record(owner, side, UnknownFeatureOrder(reason))


def unseen_images(layers: Sequence[Any], has_images: bool) -> list[tuple[Side, Shape, str]]:
    """Returns the images that are flattened or made by a reshape outside all graphs.

    Args:
        layers: Layers outside all graphs, or in a custom layer.
        has_images: bool. True if there is an image layer, so that two axes may be an image.

    Returns:
        For each image: "inputs" if it is flattened, and "outputs" if features are reshaped to it;
        its shape; and why its order is unknown for a layer.
    """
    found: list[tuple[Side, Shape, str]] = []
    for layer in layers:
        if isinstance(layer, keras.layers.Flatten):
            shape = tuple((_keras.layer_building.called_shape(layer) or ())[1:])
            side: Side = "inputs"
            reason = f"'{layer.name}' flattens {shape}, maybe for this layer"
        elif isinstance(layer, keras.layers.Reshape):  # Keras may not know its inputs
            shape, side = tuple(layer.target_shape), "outputs"
            reason = f"'{layer.name}' makes an image of {shape}, maybe from these outputs"
        else:
            continue
        if len(shape) < 2 or None in shape or -1 in shape or not (has_images or len(shape) > 2):
            continue
        if flattened_axes(shape, channels_last(len(shape))):
            found.append((side, shape, reason))
    return found


def _recurrent_layers(layer: keras.layers.Layer) -> list[Any]:
    """Returns the recurrent layers that take a layer's inputs."""
    if isinstance(layer, keras.layers.Bidirectional):
        return [layer.forward_layer, layer.backward_layer]
    return [layer] if isinstance(layer, keras.layers.RNN) else []
