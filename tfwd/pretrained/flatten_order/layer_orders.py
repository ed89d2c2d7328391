"""Orders of the features at the layers of a model, recorded one after the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.einsum_axes import summed_features
from tfwd.pretrained.flatten_order.image_axes_rules import order_after, order_of_positions
from tfwd.pretrained.flatten_order.layer_groups import (
    FIRST_AXIS_LAYERS,
    IMAGE_LAYERS,
    ORDER_PRESERVING_LAYERS,
    recurrent_cells,
)
from tfwd.pretrained.flatten_order.orders import (
    FeatureOrder,
    Shape,
    TensorOrder,
    UnknownAxisOrder,
    UnknownFeatureOrder,
    flattens_differently,
    is_flattened,
    is_order_of_torch,
)
from tfwd.pretrained.flatten_order.unseen_layers import (
    Side,
    before_convolutions,
    kernel_owners,
    outside_graphs,
    unexplained_sizes,
    unseen_images,
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
        # The order at the first call: by the layer's id, the side, and whether it is backward.
        self._recorded: dict[tuple[int, str, bool], FeatureOrder] = {}

    def differing(self) -> dict[int, LayerOrders]:
        """Returns the orders that differ from PyTorch's, by the id of the layer."""
        return {
            key: orders for key, orders in self._orders.items() if orders.inputs or orders.outputs
        }

    def record(
        self, layer: Any, side: Side, order: FeatureOrder, is_backward: bool = False
    ) -> None:
        """Records the order of a layer's inputs or outputs at one of its calls.

        Args:
            layer: The layer.
            side: "inputs" or "outputs".
            order: The order.
            is_backward: bool. True if later layers require the order. None then means that they
                require none. Default False.
        """
        orders = self._orders.setdefault(id(layer), LayerOrders())
        before = getattr(orders, side)
        at_first_call = self._recorded.setdefault((id(layer), side, is_backward), order)
        if isinstance(before, UnknownFeatureOrder) or (order == at_first_call == before):
            return
        is_conflict = order != at_first_call or (before and order and before != order)
        if is_conflict and not isinstance(order, UnknownFeatureOrder):
            order = UnknownFeatureOrder("the model calls the layer on features in several orders")
        setattr(orders, side, order or before)

    def share(self, holders: Sequence[Any]) -> None:
        """Gives layers that hold the same variable the same orders.

        Args:
            holders: The layers. An order that is not recorded for all of them in the same way is
                unknown.
        """
        found = [self._orders[id(layer)] for layer in holders if id(layer) in self._orders]
        for side in ("inputs", "outputs") if found else ():
            distinct = list(dict.fromkeys(getattr(orders, side) for orders in found))
            unknown = UnknownFeatureOrder("several layers use it on features in several orders")
            for layer in holders:
                orders = self._orders.setdefault(id(layer), LayerOrders())
                setattr(orders, side, distinct[0] if len(distinct) == 1 else unknown)

    def record_inputs(
        self, layer: keras.layers.Layer, orders: Sequence[TensorOrder], shapes: Sequence[Shape]
    ) -> None:
        """Records the order of a layer's inputs at the layers inside that have weights on them.

        Args:
            layer: Layer without wrappers.
            orders: Orders of the inputs.
            shapes: Shapes of the inputs.
        """
        flattened: list[Any] = list(filter(is_flattened, orders))
        name = layer.name
        order: FeatureOrder = None
        if flattened:
            is_same = len(set(flattened)) == 1 and len(flattened) == len(shapes)
            several = UnknownFeatureOrder(f"'{layer.name}' has several inputs")
            order = flattened[0] if is_same else several
        if cells := recurrent_cells(layer):
            if not any(map(is_flattened, orders[1:])):  # initial states
                order = flattened[0] if flattened else None
            if isinstance(orders[0], UnknownAxisOrder) and orders[0].mixes:
                order = UnknownFeatureOrder(orders[0].reason)  # the order of the steps
            for cell in cells:
                self._record_cell(cell, order, shapes[0])
        elif isinstance(layer, keras.layers.EinsumDense):
            self.record(layer, "inputs", summed_features(layer, orders[0], shapes[0]))
        elif isinstance(layer, (keras.layers.Dense, *ORDER_PRESERVING_LAYERS)):
            after = order_after(layer, order, shapes[0]) if order is not None else None
            if _has_weights_per_position(layer, orders[0]):
                after = UnknownFeatureOrder(f"'{name}' has a weight for each position of an image")
            self.record(layer, "inputs", after)  # type: ignore[arg-type]
        elif isinstance(layer, IMAGE_LAYERS) and not flattened:
            self.record(layer, "inputs", order_of_positions(layer, orders[0], shapes[0]))
        elif flattened:
            reason = f"'{layer.name}' has flattened features as inputs"
            sizes = {shape[-1] for shape in shapes if shape}
            for inner in _keras.layers.all_layers(layer):
                weights = _keras.layers.held_weights(inner)
                if any(sizes.intersection(w.shape) for w in weights):
                    self.record(inner, "inputs", UnknownFeatureOrder(reason))
        elif not _keras.is_of_keras(type(layer), "call") or isinstance(layer, keras.layers.Wrapper):
            self._record_flatten_inside(layer, orders, shapes)

    def _record_cell(self, cell: Any, order: FeatureOrder, shape: Shape) -> None:
        """Records the order of the inputs of a recurrent cell, which may contain layers.

        Args:
            cell: The cell.
            order: Order of the features of a step.
            shape: Shape of the recurrent layer's input.
        """
        self.record(cell, "inputs", order)
        if _keras.is_of_keras(type(cell), "call") or (order is None and len(shape) < 3):
            return
        reason = UnknownFeatureOrder(f"the cell '{cell.name}' takes a flattened image, or an image")
        for inner in _keras.layers.all_layers(cell):
            if _keras.layers.held_weights(inner):
                self.record(inner, "inputs", reason)

    def _record_flatten_inside(
        self, layer: keras.layers.Layer, orders: Sequence[TensorOrder], shapes: Sequence[Shape]
    ) -> None:
        """Records the layers inside a custom layer that may take a flattened image.

        Args:
            layer: Layer without a graph.
            orders: Orders of the inputs.
            shapes: Shapes of the inputs.
        """
        inside = list(outside_graphs(layer))
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
            if side == "inputs":
                self.record_beside(inside, math.prod(shape), reason)
        if has_images:
            self.record_unexplained(inside, {shape[-1] for shape in shapes if shape})

    def record_unexplained(self, layers: Sequence[Any], sizes: set[int]) -> None:
        """Records an unknown order for kernels in layers whose calls are not known.

        Args:
            layers: Layers outside all graphs, or in a custom layer. One of them takes images.
            sizes: Sizes of the last axes of the tensors that these layers take.
        """
        self.record_kernels(layers)
        for size in unexplained_sizes(layers, sizes):
            reason = f"the model does not show where the {size} features come from"
            self.record_beside(layers, size, reason)
        for layer in before_convolutions(layers):
            reason = "the model does not show whether it makes an image of these outputs"
            self.record(layer, "outputs", UnknownFeatureOrder(reason), is_backward=True)

    def record_kernels(self, layers: Sequence[Any]) -> None:
        """Records that a flattened image may be the input of any kernel of some layers."""
        reason = "the model does not show whether it flattens an image for this layer"
        for layer in layers:
            for owner in kernel_owners(layer):
                self.record(owner, "inputs", UnknownFeatureOrder(reason))

    def record_beside(self, layers: Sequence[Any], size: int, reason: str) -> None:
        """Records an unknown order for normalizations and tables that have a weight per feature.

        Args:
            layers: Layers that may use the features.
            size: int. Number of features whose order is unknown.
            reason: Why the order is unknown.
        """
        unknown = UnknownFeatureOrder(reason)
        kernels = [owner.kernel for each in layers for owner in kernel_owners(each)]
        is_taken = any(kernel.shape[0] == size for kernel in kernels)
        for layer in layers:
            if isinstance(layer, keras.layers.Dense) and layer.units == size and not is_taken:
                self.record(layer, "outputs", unknown, is_backward=True)
            shapes = [tuple(weight.shape) for weight in _keras.layers.held_weights(layer)]
            if isinstance(layer, ORDER_PRESERVING_LAYERS) and (size,) in shapes:
                self.record(layer, "inputs", unknown)
            if isinstance(layer, keras.layers.Embedding) and layer.output_dim == size:
                self.record(layer, "outputs", unknown, is_backward=True)

    def record_unseen(self, side: Side, shape: Shape, layers: Sequence[Any], reason: str) -> None:
        """Records an unknown order for layers with a weight on all entries of a tensor.

        Args:
            side: "inputs" if the layer may take the tensor, "outputs" if it may return the tensor.
            shape: Shape of the tensor.
            layers: Layers outside all graphs, or in a custom layer.
            reason: Why the order is unknown.
        """
        if side == "outputs" and -1 in shape:
            size = math.prod(each for each in shape if each != -1)
            for owner in layers:
                if isinstance(owner, keras.layers.Dense) and owner.units % size == 0:
                    self.record(owner, side, UnknownFeatureOrder(reason))
            return
        if None in shape:
            return
        axis = 0 if side == "inputs" else -1
        for owner in layers:
            shapes = [tuple(weight.shape) for weight in _keras.layers.held_weights(owner)]
            is_kernel = not isinstance(owner, ORDER_PRESERVING_LAYERS) and _keras.is_of_keras(
                type(owner), "call"
            )
            if any(len(each) > is_kernel and each[axis] == math.prod(shape) for each in shapes):
                self.record(owner, side, UnknownFeatureOrder(reason))


def _has_weights_per_position(layer: Any, order: TensorOrder) -> bool:
    """Returns True if the weights of a layer on an image differ along one axis of positions."""
    if not isinstance(order, tuple) or is_order_of_torch(order):
        return False
    axes: list[int] = []
    if isinstance(layer, keras.layers.PReLU):
        axes = [axis for axis, size in enumerate(layer.alpha.shape) if size != 1]
    elif isinstance(layer, FIRST_AXIS_LAYERS):
        given = [layer.axis] if isinstance(layer.axis, int) else list(layer.axis)
        axes = [axis - 1 if axis > 0 else axis for axis in given]
    return len(axes) == 1 and order[axes[0]] != 0
