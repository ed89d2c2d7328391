"""Propagation of orders through the graphs of a model: forward from inputs, then backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.backward_rules import (
    required_beside_flattened,
    required_input_order,
)
from tfwd.pretrained.flatten_order.forward_rules import output_order
from tfwd.pretrained.flatten_order.layer_groups import IMAGE_LAYERS
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders, OrderRecorder
from tfwd.pretrained.flatten_order.orders import (
    Shape,
    TensorOrder,
    UnknownFeatureOrder,
    channels_last,
    common_order,
    flattened_axes,
    is_flattened,
)


def orders_by_layer(model: keras.layers.Layer) -> dict[int, LayerOrders]:
    """Returns the orders of layers that differ from PyTorch's, by the id of the layer."""
    propagation = _Propagation()
    propagation.run(model)
    return propagation.recorder.differing()


class _Propagation:
    """Pass through the graphs of a model and of the models inside.

    Attributes:
        recorder: Gets the orders at each layer with weights.
    """

    def __init__(self) -> None:
        self.recorder = OrderRecorder()
        self._orders: dict[int, TensorOrder] = {}  # of the tensors of all graphs, by id
        self._in_graphs: set[int] = set()  # ids of layers

    def run(self, model: keras.layers.Layer) -> None:
        without_graph: list[Any] = []
        self._run_graphs(model, without_graph)
        self._record_unseen_flatten(
            [layer for layer in without_graph if id(layer) not in self._in_graphs]
        )

    def _run_graphs(self, layer: Any, without_graph: list[Any]) -> None:
        """Runs through all graphs inside a layer, and collects the layers that have no graph."""
        if id(layer) in self._in_graphs:
            return
        graph = _keras.layers.graph(layer)
        if graph is not None:
            self._forward(graph, [None] * len(graph.inputs))
            self._backward(graph, [None] * len(graph.outputs))
        else:
            without_graph.append(layer)
        for inner in _keras.layers.sublayers(layer):
            self._run_graphs(inner, without_graph)

    def _record_unseen_flatten(self, layers: list[Any]) -> None:
        """Records the layers of a subclassed model that may take the output of a `Flatten` layer.

        Args:
            layers: Layers that are in no graph.
        """
        if not any(isinstance(layer, IMAGE_LAYERS) for layer in layers):
            return
        for layer in layers:
            if not isinstance(layer, keras.layers.Flatten):
                continue
            shape = tuple((_keras.layer_building.called_shape(layer) or ())[1:])
            if len(shape) < 2 or None in shape:
                continue
            if not flattened_axes(shape, channels_last(len(shape))):
                continue
            reason = f"'{layer.name}' flattens {shape}, maybe for this layer"
            for owner in layers:
                weights = _keras.layers.held_weights(owner)
                if any(tuple(w.shape)[:1] == (math.prod(shape),) for w in weights):
                    self.recorder.record(owner, "inputs", UnknownFeatureOrder(reason))

    def _forward(self, graph: Any, inputs: Sequence[TensorOrder]) -> list[TensorOrder]:
        """Returns the orders of a graph's outputs. Records the orders of the layers' inputs.

        Args:
            graph: Graph of a model.
            inputs: Orders of the graph's inputs.
        """
        orders: dict[int, TensorOrder] = dict(zip(map(id, graph.inputs), inputs, strict=True))
        for operation, arguments, outputs in graph.nodes:
            found = self._layer_forward(
                _unwrapped(operation),
                [orders.get(id(tensor)) for tensor in arguments],
                [_shape_of(tensor) for tensor in arguments],
                [_shape_of(tensor) for tensor in outputs],
            )
            orders.update(zip(map(id, outputs), found, strict=False))
        self._orders.update(orders)
        return [orders.get(id(tensor)) for tensor in graph.outputs]

    def _layer_forward(
        self,
        layer: Any,
        orders: list[TensorOrder],
        shapes: list[Shape],
        results: list[Shape],
    ) -> list[TensorOrder]:
        """Returns the orders of a layer's outputs. Records the orders of its inputs.

        Args:
            layer: Layer without wrappers, or operation of a graph.
            orders: Orders of the inputs.
            shapes: Shapes of the inputs.
            results: Shapes of the outputs.
        """
        graph = _keras.layers.graph(layer)
        if graph is not None:
            self._in_graphs.add(id(layer))
            if len(graph.inputs) != len(orders):
                return [None] * len(results)
            return self._forward(graph, orders)
        if isinstance(layer, keras.layers.TimeDistributed):
            self._in_graphs.add(id(layer))
            return _for_one_time_step(self._layer_forward, layer, orders, shapes, results)
        if isinstance(layer, keras.layers.Layer):
            self._in_graphs.update(map(id, _keras.layers.all_layers(layer)))
            self.recorder.record_inputs(layer, orders, shapes)
        if not orders or not results:
            return [None] * len(results)
        first = output_order(layer, orders, shapes, results[0])
        return [first, *[None] * (len(results) - 1)]

    def _backward(self, graph: Any, outputs: Sequence[TensorOrder]) -> list[TensorOrder]:
        """Returns the orders that a graph requires of its inputs.

        Records the layers whose outputs become images.

        Args:
            graph: Graph of a model.
            outputs: Orders that later layers require of the graph's outputs.
        """
        required: dict[int, list[TensorOrder]] = {}
        for tensor, order in zip(graph.outputs, outputs, strict=True):
            required.setdefault(id(tensor), []).append(order)
        for operation, arguments, results in reversed(graph.nodes):
            layer = _unwrapped(operation)
            shapes = [_shape_of(tensor) for tensor in arguments]
            result_shapes = [_shape_of(tensor) for tensor in results]
            later = [_common(required.get(id(tensor), [])) for tensor in results]
            found = self._layer_backward(layer, later, shapes, result_shapes)
            orders = [self._orders.get(id(tensor)) for tensor in arguments]
            if any(map(is_flattened, orders)):
                found = required_beside_flattened(layer, found, orders, shapes, result_shapes[0])
            for tensor, order in zip(arguments, found, strict=True):
                required.setdefault(id(tensor), []).append(order)
        return [_common(required.get(id(tensor), [])) for tensor in graph.inputs]

    def _layer_backward(
        self,
        layer: Any,
        required: list[TensorOrder],
        shapes: list[Shape],
        results: list[Shape],
    ) -> list[TensorOrder]:
        """Returns the orders that a layer requires of its inputs. Records its outputs' orders.

        Args:
            layer: Layer without wrappers, or operation of a graph.
            required: Orders that later layers require of the outputs.
            shapes: Shapes of the inputs.
            results: Shapes of the outputs.
        """
        if isinstance(layer, keras.layers.TimeDistributed):
            return _for_one_time_step(self._layer_backward, layer, required, shapes, results)
        graph = _keras.layers.graph(layer)
        if graph is None and required:
            return [
                required_input_order(layer, required[0], shape, results[0], self.recorder)
                for shape in shapes
            ]
        if graph and (len(graph.inputs), len(graph.outputs)) == (len(shapes), len(required)):
            return self._backward(graph, required)
        return [None] * len(shapes)


def _common(orders: list[TensorOrder]) -> TensorOrder:
    """Returns the order that all later layers require of a tensor."""
    return common_order(
        orders, conflict="its outputs become an image, and other layers use them too"
    )


def _for_one_time_step(
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
    found = function(
        _unwrapped(layer.layer),
        [_without_time(order) for order in orders],
        [shape[1:] for shape in shapes],
        [shape[1:] for shape in results],
    )
    return [_with_time(order) for order in found]


def _without_time(order: TensorOrder) -> TensorOrder:
    """Returns the order of one time step of a tensor, which `TimeDistributed` passes on."""
    if not isinstance(order, tuple):
        return order
    in_torch = sorted(order[1:])
    return tuple(in_torch.index(position) for position in order[1:])


def _with_time(order: TensorOrder) -> TensorOrder:
    """Returns the order of a tensor, from the order of one of its time steps."""
    return (0, *(position + 1 for position in order)) if isinstance(order, tuple) else order


def _shape_of(tensor: Any) -> Shape:
    """Returns the shape without the first axis; empty if the number of axes is unknown."""
    shape = tensor.shape
    return () if getattr(shape, "rank", 0) is None else tuple(shape)[1:]


def _unwrapped(layer: Any) -> Any:
    """Returns a layer without the wrappers of tfwd."""
    while isinstance(layer, _keras.layer_wrappers.Wraps):
        layer = layer.layer
    return layer
