"""Propagation of orders through the graphs of a model: forward from inputs, then backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.backward_rules import (
    required_beside_flattened,
    required_beside_image,
    required_input_order,
)
from tfwd.pretrained.flatten_order.forward_rules import output_order
from tfwd.pretrained.flatten_order.layer_graphs import LayerGraphs
from tfwd.pretrained.flatten_order.layer_groups import is_reshape, unwrapped, weights_of
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders, OrderRecorder
from tfwd.pretrained.flatten_order.model_ends import (
    input_order,
    shape_of,
    shapes_at_ends,
    takes_image,
)
from tfwd.pretrained.flatten_order.orders import (
    Shape,
    TensorOrder,
    UnknownAxisOrder,
    UnknownFeatureOrder,
    common_order,
    flattens_differently,
    is_flattened,
    is_image,
    is_order_of_torch,
)
from tfwd.pretrained.flatten_order.time_steps import for_one_time_step
from tfwd.pretrained.flatten_order.traced_operations import TracedOperation
from tfwd.pretrained.flatten_order.unseen_layers import (
    Side,
    image_layer_ids,
    outside_graphs,
    unseen_images,
)

_IN_OPERATION = "the model uses it in an operation on flattened features"


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
        # Orders that layers require of the tensors of all graphs, by id.
        self._uses: dict[int, list[TensorOrder]] = {}
        self._weighted: set[int] = set()  # ids of tensors that depend on weights
        self._in_graphs: set[int] = set()  # ids of layers
        self._owners: dict[int, Any] = {}  # layers that hold variables, by the handle's id
        self._graphs = LayerGraphs()
        self._image_layers: set[int] = set()  # ids of layers
        # Graphs inside layers without a graph: the model's name, and the orders of the outputs.
        self._graphs_inside: list[tuple[str, Any, list[TensorOrder]]] = []

    def run(self, model: keras.layers.Layer) -> None:
        everything = _keras.layers.all_layers(model)
        self._image_layers = image_layer_ids(model)
        holders = self._find_holders(everything)
        without_graph: list[Any] = []
        self._run_graphs(model, without_graph)
        unseen = [layer for layer in without_graph if id(layer) not in self._in_graphs]
        is_shown = self._graphs.of_first_call(model) is not None
        for side, shape, reason in self._unseen_images(unseen):
            # Another method, or a branch of the call, may use the layers of the graph too.
            self.recorder.record_unseen(side, shape, everything if is_shown else unseen, reason)
            if side == "inputs" and None not in shape:
                self.recorder.record_beside(unseen, math.prod(shape), reason)
            if None not in shape and -1 not in shape:
                self._run_graphs_inside(side, math.prod(shape), UnknownFeatureOrder(reason))
        if self._image_layers or takes_image(model):
            sizes = {shape[-1] for shape in shapes_at_ends(model, self._graphs_inside) if shape}
            self.recorder.record_unexplained(unseen, sizes)
        if is_shown and any(id(layer) in self._image_layers for layer in unseen):
            self.recorder.record_kernels(everything)
        for layers in holders:
            self.recorder.share(layers)

    def _find_holders(self, layers: Sequence[Any]) -> list[list[Any]]:
        """Finds the layers that hold each variable. Returns them for shared variables only.

        Args:
            layers: All layers of the model.
        """
        holders: dict[int, list[Any]] = {}
        for layer in layers:
            for weight in _keras.layers.held_weights(layer):
                holders.setdefault(id(weight), []).append(layer)
                for variable in _keras.variables.tf_variables(weight):
                    parts = getattr(variable, "values", [variable])  # of each replica
                    self._owners.update((id(part.handle), layer) for part in parts)
        return [found for found in holders.values() if len(found) > 1]

    def _run_graphs(self, layer: Any, without_graph: list[Any], is_inside: bool = False) -> None:
        """Runs through all graphs inside a layer, and collects the layers that have no graph.

        Args:
            layer: The layer.
            without_graph: Gets the layers.
            is_inside: bool. True if another layer without a graph contains the layer.
        """
        layer = unwrapped(layer)
        is_called = id(layer) in self._in_graphs
        graph = _keras.layers.graph(layer) if is_called else self._graphs.of_first_call(layer)
        if graph is not None and not is_called:
            beside = None
            if is_inside and self._image_layers - image_layer_ids(layer):
                beside = UnknownAxisOrder(f"the model does not show what calls '{layer.name}'")
            outputs = [beside if len(shape_of(t)) > 1 else None for t in graph.outputs]
            found = self._forward(graph, self._input_orders(graph, beside, outputs))
            self._backward(graph, outputs)
            if is_inside:
                self._graphs_inside.append((layer.name, graph, found))
        elif not is_called:
            without_graph.append(layer)
        is_inside = is_inside or graph is None or bool(graph.callers)  # what a trace did not call
        for inner in _keras.layers.sublayers(layer):
            self._run_graphs(inner, without_graph, is_inside)

    def _input_orders(
        self, graph: Any, beside: UnknownAxisOrder | None, outputs: Sequence[TensorOrder]
    ) -> list[TensorOrder]:
        """Returns the orders of a graph's inputs, which the first layers of the graph show.

        Args:
            graph: Graph of a model.
            beside: Order of all inputs, if the model does not show them.
            outputs: Orders that are required of the graph's outputs.
        """
        recorder, self.recorder = self.recorder, OrderRecorder()
        required = self._backward(graph, outputs)  # without the orders of a forward pass
        self.recorder = recorder
        if beside is not None:
            several, one = beside, UnknownFeatureOrder(beside.reason)
            return [several if len(shape_of(tensor)) > 1 else one for tensor in graph.inputs]
        return list(map(input_order, graph.inputs, required))

    def _unseen_images(self, layers: Sequence[Any]) -> Iterator[tuple[Side, Shape, str]]:
        """Yields the images that may be flattened or made outside all graphs.

        Args:
            layers: Layers that are in no graph.

        Yields:
            As `unseen_images` returns.
        """
        yield from unseen_images(layers, has_images=bool(self._image_layers))
        for name, graph, orders in self._graphs_inside:
            for shape in map(shape_of, graph.inputs):
                if len(shape) > 2 and None not in shape:
                    reason = f"'{name}' takes an image of {shape}, maybe made from these outputs"
                    yield "outputs", shape, reason
            for tensor, order in zip(graph.outputs, orders, strict=True):
                shape = shape_of(tensor)
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
            orders = [order if shape_of(tensor) == (size,) else None for tensor in tensors]
            if any(orders):
                (self._forward if side == "inputs" else self._backward)(graph, orders)

    def _forward(self, graph: Any, inputs: Sequence[TensorOrder]) -> list[TensorOrder]:
        """Returns the orders of a graph's outputs. Records the orders of the layers' inputs.

        Args:
            graph: Graph of a model.
            inputs: Orders of the graph's inputs.
        """
        orders: dict[int, TensorOrder] = dict(zip(map(id, graph.inputs), inputs, strict=True))
        self._in_graphs.update(map(id, graph.callers))
        self._record_variables(graph.reshaped, "the model reshapes it in an operation")
        for node in graph.nodes:
            operation, arguments, outputs = node.operation, node.arguments, node.results
            layer, shapes = unwrapped(operation), list(map(shape_of, arguments))
            self._graphs.trace(layer, shapes, node)
            found = self._layer_forward(
                layer,
                [orders.get(id(tensor)) for tensor in arguments],
                shapes,
                [shape_of(tensor) for tensor in outputs],
            )
            has_weights = bool(weights_of(operation) or getattr(operation, "variables", None))
            if has_weights or not self._weighted.isdisjoint(map(id, arguments)):
                self._weighted.update(map(id, outputs))
            orders.update(
                (id(tensor), self._order_of_uses(operation, tensor, order))
                for tensor, order in zip(outputs, found, strict=False)
            )
        for key, order in orders.items():
            self._orders[key] = _of_calls(self._orders.get(key), order)
        return [orders.get(id(tensor)) for tensor in graph.outputs]

    def _order_of_uses(self, layer: Any, tensor: Any, order: TensorOrder) -> TensorOrder:
        """Returns the order of a tensor, which is unknown if its uses need several orders.

        Args:
            layer: Layer or operation that returns the tensor.
            tensor: The tensor.
            order: Order that the layer shows.
        """
        uses = self._uses.get(id(tensor), [])
        if isinstance(order, UnknownAxisOrder) or is_flattened(order) or len(shape_of(tensor)) < 2:
            return order
        required = _common(uses)
        if order is None and is_reshape(layer) and is_image(required):
            return required  # features that are reshaped to an image
        sequences = [use is not None and is_order_of_torch(use) for use in uses]
        images = [is_image(use) for use in uses]
        if is_image(order):
            is_known = all(sequences) or not any(sequences)
        else:
            is_known = all(images) or not any(images)
        several = UnknownAxisOrder("the outputs of a layer are used in several orders of axes")
        return order if is_known else several

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
        graph = self._graphs.find(layer, shapes)
        if graph is not None:
            if len(graph.inputs) != len(orders):  # it will run as a graph that nothing calls
                reason = f"the model does not show how it calls '{layer.name}'"
                return [
                    UnknownAxisOrder(reason) if len(shape) > 1 else UnknownFeatureOrder(reason)
                    for shape in results
                ]
            self._in_graphs.add(id(layer))
            return self._forward(graph, orders)
        if isinstance(layer, keras.layers.TimeDistributed):
            self._in_graphs.add(id(layer))
            return for_one_time_step(self._layer_forward, layer, orders, shapes, results)
        if isinstance(layer, keras.layers.Layer):
            self._in_graphs.update(map(id, outside_graphs(layer)))
            self.recorder.record_inputs(layer, orders, shapes)
        if isinstance(layer, TracedOperation) and any(map(is_flattened, orders)):
            self._record_variables(layer.variables, _IN_OPERATION)
        if not orders or not results:
            return [None] * len(results)
        found = [output_order(layer, orders, shapes, result) for result in results]
        for order, result in zip(found, results, strict=True):
            is_custom = isinstance(layer, keras.layers.Layer) and len(result) == 1
            if (
                is_custom
                and isinstance(order, UnknownFeatureOrder)
                and not any(map(is_flattened, orders))
            ):
                inside = _keras.layers.all_layers(layer)
                self.recorder.record_beside(inside, result[0], order.reason)
        return found

    def _record_variables(self, handles: Iterable[int], reason: str) -> None:
        """Records an unknown order for the layers that hold variables, by the handles' ids."""
        for owner in filter(None, map(self._owners.get, handles)):
            self.recorder.record(owner, "inputs", UnknownFeatureOrder(reason))

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
        for node in reversed(graph.nodes):
            arguments, results = node.arguments, node.results
            layer, shapes = unwrapped(node.operation), list(map(shape_of, arguments))
            self._graphs.trace(layer, shapes, node)
            result_shapes = [shape_of(tensor) for tensor in results]
            later = [_common(required.get(id(tensor), [])) for tensor in results]
            found = self._layer_backward(layer, later, shapes, result_shapes)
            orders = [self._orders.get(id(tensor)) for tensor in arguments]
            if any(map(is_flattened, orders)) and self._graphs.find(layer, shapes) is None:
                weighted = [id(tensor) in self._weighted for tensor in arguments]
                found = required_beside_flattened(
                    layer, found, orders, shapes, result_shapes[0], weighted
                )
            order = self._orders.get(id(results[0]))
            found = required_beside_image(layer, found, orders, shapes, result_shapes[0], order)
            for tensor, order in zip(arguments, found, strict=True):
                required.setdefault(id(tensor), []).append(order)
        self._uses.update(required)
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
            return for_one_time_step(self._layer_backward, layer, required, shapes, results)
        if isinstance(layer, TracedOperation) and any(map(is_flattened, required)):
            self._record_variables(layer.variables, _IN_OPERATION)
        graph = self._graphs.find(layer, shapes)
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


def _of_calls(before: TensorOrder, order: TensorOrder) -> TensorOrder:
    """Returns the order of a tensor of a graph that is called several times."""
    if before == order or before is None or order is None:
        return before or order
    if is_flattened(before) or is_flattened(order):
        return UnknownFeatureOrder("the model calls a part of it on features in several orders")
    return UnknownAxisOrder("the model calls a part of it on several orders of axes")


def _common(orders: list[TensorOrder]) -> TensorOrder:
    """Returns the order that all later layers require of a tensor."""
    return common_order(
        orders,
        conflict="its outputs become an image, and other layers use them too",
        of_axes="its outputs are used in several orders of axes",
    )
