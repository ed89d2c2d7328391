"""Propagation of orders through the graphs of a model: forward from inputs, then backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.backward_rules import (
    required_beside_flattened,
    required_input_order,
)
from tfwd.pretrained.flatten_order.forward_rules import output_order
from tfwd.pretrained.flatten_order.layer_groups import IMAGE_LAYERS
from tfwd.pretrained.flatten_order.layer_orders import (
    LayerOrders,
    OrderRecorder,
    Side,
    unseen_images,
)
from tfwd.pretrained.flatten_order.orders import (
    Shape,
    TensorOrder,
    UnknownAxisOrder,
    UnknownFeatureOrder,
    common_order,
    flattens_differently,
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
        self._image_layers: set[int] = set()  # ids of layers
        # Graphs inside layers without a graph: the model's name, and the orders of the outputs.
        self._graphs_inside: list[tuple[str, Any, list[TensorOrder]]] = []

    def run(self, model: keras.layers.Layer) -> None:
        self._image_layers = _image_layers(model)
        without_graph: list[Any] = []
        self._run_graphs(model, without_graph)
        unseen = [layer for layer in without_graph if id(layer) not in self._in_graphs]
        for side, shape, reason in self._unseen_images(unseen):
            self.recorder.record_unseen(side, shape, unseen, reason)
            if None not in shape:
                self._run_graphs_inside(side, math.prod(shape), UnknownFeatureOrder(reason))

    def _run_graphs(self, layer: Any, without_graph: list[Any], is_inside: bool = False) -> None:
        """Runs through all graphs inside a layer, and collects the layers that have no graph.

        Args:
            layer: The layer.
            without_graph: Gets the layers.
            is_inside: bool. True if another layer without a graph contains the layer.
        """
        layer = _unwrapped(layer)
        if id(layer) in self._in_graphs:
            return
        graph = _keras.layers.graph(layer)
        if graph is not None:
            beside = None
            if is_inside and self._image_layers - _image_layers(layer):
                beside = UnknownAxisOrder(f"the model does not show what calls '{layer.name}'")
            ends = [*graph.inputs, *graph.outputs]
            orders = [beside if len(_shape_of(tensor)) > 1 else None for tensor in ends]
            found = self._forward(graph, orders[: len(graph.inputs)])
            self._backward(graph, orders[len(graph.inputs) :])
            if is_inside:
                self._graphs_inside.append((layer.name, graph, found))
        else:
            without_graph.append(layer)
        for inner in _keras.layers.sublayers(layer):
            self._run_graphs(inner, without_graph, is_inside=is_inside or graph is None)

    def _unseen_images(self, layers: Sequence[Any]) -> Iterator[tuple[Side, Shape, str]]:
        """Yields the images that may be flattened or made outside all graphs.

        Args:
            layers: Layers that are in no graph.

        Yields:
            As `unseen_images` returns.
        """
        yield from unseen_images(layers, has_images=bool(self._image_layers))
        for name, graph, orders in self._graphs_inside:
            for tensor, order in zip(graph.outputs, orders, strict=True):
                shape = _shape_of(tensor)
                if is_flattened(order):
                    reason = f"'{name}' returns flattened features, maybe for this layer"
                    yield "inputs", shape[-1:], reason
                elif flattens_differently(order, shape):
                    reason = f"'{name}' returns an image of {shape}, maybe flattened for this layer"
                    yield "inputs", shape, reason

    def _run_graphs_inside(self, side: Side, size: int, order: UnknownFeatureOrder) -> None:
        """Runs again through the graphs that may take features, or return them.

        Args:
            side: "inputs" or "outputs" of the graphs.
            size: Number of features.
            order: Their order.
        """
        for _, graph, _ in self._graphs_inside:
            tensors = graph.inputs if side == "inputs" else graph.outputs
            orders = [order if _shape_of(tensor) == (size,) else None for tensor in tensors]
            if any(orders):
                (self._forward if side == "inputs" else self._backward)(graph, orders)

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
        return [output_order(layer, orders, shapes, result) for result in results]

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
            used = [i for i, order in enumerate(required) if order is not None] or [0]
            return [
                _common(
                    [
                        required_input_order(layer, required[i], shape, results[i], self.recorder)
                        for i in used
                    ]
                )
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
    if any(isinstance(order, tuple) and order[:1] != (0,) for order in orders):
        # PyTorch has another axis first, so its model cannot run the layer on steps of this one.
        reason = f"'{layer.name}' runs its layer along an axis of an image"
        return [UnknownAxisOrder(reason) for _ in found]
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


def _image_layers(layer: Any) -> set[int]:
    """Returns the ids of the image layers that a layer is or contains."""
    inside = _keras.layers.all_layers(layer)
    return {id(inner) for inner in inside if isinstance(inner, IMAGE_LAYERS)}


def _unwrapped(layer: Any) -> Any:
    """Returns a layer without the wrappers of tfwd."""
    while isinstance(layer, _keras.layer_wrappers.Wraps):
        layer = layer.layer
    return layer
