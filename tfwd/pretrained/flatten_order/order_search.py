"""Search for the orders of features in a model: a pass over the calls of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.pretrained.flatten_order.axes import Axis
from tfwd.pretrained.flatten_order.layer_call import Call
from tfwd.pretrained.flatten_order.layer_groups import IMAGE_LAYERS, is_composite, unwrapped
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders, OrderRecorder
from tfwd.pretrained.flatten_order.layer_rules import outputs_of_layer, outputs_of_unknown_layer
from tfwd.pretrained.flatten_order.layouts_in_torch import Layout, Place
from tfwd.pretrained.flatten_order.made_axes import MergedAxis
from tfwd.pretrained.flatten_order.operation_rules import OperationCall, outputs_of_operation
from tfwd.pretrained.flatten_order.orders import UnknownFeatureOrder
from tfwd.pretrained.flatten_order.tensor_axes import (
    Sizes,
    TensorAxes,
    has_natural_order,
    with_unknown_axes,
)
from tfwd.pretrained.flatten_order.traced_calls import traced_graph
from tfwd.pretrained.flatten_order.traced_operations import Graph, Node, TracedOperation
from tfwd.pretrained.flatten_order.unseen_layers import (
    reshapes_in_code,
    takes_images,
    unseen_images,
)
from tfwd.pretrained.flatten_order.unseen_orders import (
    record_hidden_reshape,
    record_kernels,
    record_unexplained,
    record_unseen,
)


def orders_by_layer(model: keras.layers.Layer) -> dict[int, LayerOrders]:
    """Returns the orders of layers that differ from PyTorch's, by the id of the layer."""
    search = _Search()
    search.run(model)
    return search.recorder.found()


class _Search:
    """Pass over the calls in a model.

    Attributes:
        recorder: Gets the orders at each layer with weights.
    """

    def __init__(self) -> None:
        self.recorder = OrderRecorder()
        self._called: set[int] = set()  # ids of layers
        self._owners: dict[int, Any] = {}  # layers that hold variables, by the handle's id
        self._image_layers: set[int] = set()  # ids of layers
        # Results of models inside a model whose own call cannot be traced.
        self._inside: list[tuple[str, TensorAxes]] = []

    def run(self, model: keras.layers.Layer) -> None:
        """Records the orders of all layers in a model."""
        everything = _keras.layers.all_layers(model)
        self._image_layers = {id(layer) for layer in everything if isinstance(layer, IMAGE_LAYERS)}
        holders = self._find_holders(everything)
        is_shown = self._run_call(model)
        if not is_shown:
            self._run_calls_inside(model)
        self.recorder.finish(everything)
        unseen = [layer for layer in everything if id(layer) not in self._called]
        self._record_unseen(model, everything, unseen, is_shown)
        for layers in holders:
            self.recorder.share(layers)

    def _record_unseen(
        self, model: Any, everything: list[Any], unseen: list[Any], is_shown: bool
    ) -> None:
        """Records unknown orders for layers that no traced call reaches."""
        if not any(_keras.layers.held_weights(layer) for layer in unseen):
            return
        for side, shape, reason in unseen_images(unseen, has_images=bool(self._image_layers)):
            # Another method, or a branch of the call, may use the layers of the graph too.
            record_unseen(self.recorder, side, shape, everything if is_shown else unseen, reason)
        for name, result in self._inside:
            orders = [axis.order() for axis in result.entries]
            image: Any = result.sizes[1:]
            if any(orders):
                reason = f"'{name}' returns flattened features, maybe for this layer"
            elif len(result.used) > 2 and not result.is_as_in_keras():
                reason = f"'{name}' returns an image of {image}, maybe flattened for this layer"
            else:
                continue
            record_unseen(self.recorder, "inputs", image, unseen, reason)
        for size in self.recorder.flattened_sizes:
            reason = f"the model flattens an image to {size} features, maybe for this layer too"
            record_unseen(self.recorder, "inputs", (size,), unseen, reason)
        given = _keras.layer_building.called_shape(model)
        if self._image_layers or takes_images(model):
            record_unexplained(self.recorder, unseen, _last_sizes(given))
        for each in everything:
            if reshapes_in_code(each, is_traced=is_shown or each is not model):
                record_hidden_reshape(self.recorder, each, unseen)
                break  # the first unknown order of a layer counts
        if is_shown and any(id(layer) in self._image_layers for layer in unseen):
            record_kernels(self.recorder, everything)

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

    def _run_call(self, model: Any) -> bool:
        """Traces a model, and passes over its calls. Returns False if it cannot be traced."""
        layer = unwrapped(model)
        graph = traced_graph(layer) if is_composite(layer) else None
        if graph is None:
            return False
        batch = Axis(_first_size(graph.inputs[0]) if graph.inputs else 2)
        first = [_of_input(tensor, batch) for tensor in graph.inputs]
        recorder, self.recorder = self.recorder, OrderRecorder()
        self._pass(graph, first, batch)  # all layers may show the order of an input
        self.recorder = recorder
        inputs = [
            _of_input(tensor, batch, axes) for tensor, axes in zip(graph.inputs, first, strict=True)
        ]
        self._pass(graph, inputs, batch)
        return True

    def _run_calls_inside(self, layer: Any) -> None:
        """Passes over the calls of the models inside a layer whose own call cannot be traced."""
        for inner in map(unwrapped, _keras.layers.sublayers(layer)):
            graph = traced_graph(inner) if inner.weights and is_composite(inner) else None
            if graph is None:
                self._run_calls_inside(inner)
                continue
            batch = Axis(_first_size(graph.inputs[0]))
            reason = f"the model does not show what calls '{inner.name}'"
            others = self._image_layers - {id(each) for each in _keras.layers.all_layers(inner)}
            inputs = [
                with_unknown_axes(_shape_of(tensor), reason, batch)
                if others
                else _of_input(tensor, batch)
                for tensor in graph.inputs
            ]
            results = self._pass(graph, inputs, batch)
            for result in results:
                self._inside.append((inner.name, result))

    def _pass(self, graph: Graph, inputs: Sequence[TensorAxes], batch: Axis) -> list[TensorAxes]:
        """Returns the axes of a graph's outputs. Records the axes at its layers.

        Args:
            graph: The calls of a model.
            inputs: Axes of the graph's inputs.
            batch: Axis of the examples.
        """
        tensors = {_id(t): axes for t, axes in zip(graph.inputs, inputs, strict=True)}
        self._called.update(map(id, graph.callers))
        for owner in filter(None, map(self._owners.get, graph.reshaped)):
            reason = "the model reshapes a weight of its layer in an operation"
            self.recorder.record(owner, "inputs", UnknownFeatureOrder(reason))
        for node in graph.nodes:
            operation = node.operation
            shapes = list(map(_shape_of, node.results))
            try:
                found = self._outputs_of(node, tensors, shapes, batch)
            except (AssertionError, IndexError, KeyError, TypeError, ValueError):
                # The call has a form that its rule does not know.
                if isinstance(operation, keras.layers.Layer):
                    record_kernels(self.recorder, _keras.layers.all_layers(operation))
                found = [_misread(operation, shape, batch) for shape in shapes]
            found = [
                axes if axes.sizes == shape else _misread(operation, shape, batch)
                for axes, shape in zip(found, shapes, strict=False)
            ]
            _forget_lost_orders(
                [tensors[_id(t)] for t in node.arguments if _id(t) in tensors], found
            )
            tensors.update(zip(map(_id, node.results), found, strict=False))
        return [tensors[_id(t)] for t in graph.outputs if _id(t) in tensors]

    def _outputs_of(
        self, node: Node, tensors: dict[Any, TensorAxes], shapes: Sequence[Sizes], batch: Axis
    ) -> list[TensorAxes]:
        """Returns the axes of the outputs of a call."""
        operation = node.operation
        if not isinstance(operation, TracedOperation):
            axes = [tensors[_id(t)] if _id(t) in tensors else _constant(t) for t in node.arguments]
            return self._run_layer(operation, axes, shapes, batch)
        given = iter(node.arguments)
        known = [tensors[_id(next(given))] if k else None for k in operation.is_known]
        owners = [o for v in operation.variables if (o := self._owners.get(v)) is not None]
        call = OperationCall(operation, known, shapes, batch, self.recorder, owners)
        return outputs_of_operation(call)

    def _run_layer(
        self, layer: Any, tensors: Sequence[TensorAxes], shapes: Sequence[Sizes], batch: Axis
    ) -> list[TensorAxes]:
        """Returns the axes of a layer's outputs."""
        self._called.update(map(id, _keras.layers.all_layers(layer)))
        inner = unwrapped(layer)

        def run(
            other: Any, given: Sequence[TensorAxes], results: Sequence[Sizes]
        ) -> list[TensorAxes]:
            return self._run_layer(other, given, results, batch)

        if not is_composite(inner):
            return outputs_of_layer(Call(inner, tensors, shapes, batch, self.recorder, run))
        specs = [tf.TensorSpec((None, *tensor.sizes[1:])) for tensor in tensors]
        graph = traced_graph(inner, (tuple(specs), {}), specs)
        if graph is None or len(graph.inputs) != len(tensors):
            return outputs_of_unknown_layer(Call(inner, tensors, shapes, batch, self.recorder, run))
        own_batch = Axis(_first_size(graph.inputs[0]))
        results = self._pass(graph, [_with_batch(t, own_batch) for t in tensors], own_batch)
        return [_with_batch(result, batch) for result in results]


def _misread(operation: Any, shape: Sizes, batch: Axis) -> TensorAxes:
    """Returns the axes of an output that has another shape than the call's rule expects."""
    name = getattr(operation, "name", "")
    return with_unknown_axes(shape, f"the model does not show what '{name}' does", batch)


def _forget_lost_orders(given: Sequence[TensorAxes], results: Sequence[TensorAxes]) -> None:
    """Assumes no order for tensors whose later uses do not show it any more.

    Args:
        given: Inputs of a call.
        results: Its outputs. If they have the same layout, later layers may show it.
    """
    kept = {id(result.layout.find()) for result in results}
    for result in results:
        kept |= {id(a.layout.find()) for a in result.entries if isinstance(a, MergedAxis)}
    for tensor in given:
        layout = tensor.layout.find()
        is_kept = id(layout) in kept or layout.is_restricted or not layout.is_open
        if not is_kept and not _is_whole_again(tensor, results):
            layout.drop_default("the model uses it in ways that do not show the order of its axes")


def _is_whole_again(tensor: TensorAxes, results: Sequence[TensorAxes]) -> bool:
    """Returns True if a result is the vector that was divided into a tensor."""
    owners = {owner for axis in tensor.entries for owner in axis.owners}
    return any(axis.find() in owners for result in results for axis in result.entries)


def _of_input(tensor: Any, batch: Axis, shown: TensorAxes | None = None) -> TensorAxes:
    """Returns the axes of an input of a model. With several axes, it may be an image.

    Args:
        tensor: The input.
        batch: Axis of the examples.
        shown: Axes of the same input, after all layers have shown its order. Default None.
    """
    shape = _shape_of(tensor)
    axes: list[Axis | None] = [None if size == 1 else Axis(size, is_input=True) for size in shape]
    axes[0] = batch
    places = tuple(None if axis is None else Place() for axis in axes)
    used = tuple(place for place in places if place is not None)
    possible = {used}
    if axes[-1] is not None:
        others, last = used[1:-1], used[-1]
        possible = {(used[0], *others[:n], last, *others[n:]) for n in range(len(used) - 1)}
    reason = f"the model does not show what the axes of {shape[1:]}, its input, are"
    default = used if has_natural_order(axes) else None
    if shown is None:
        layout = Layout(possible, reason=reason, default=default, is_open=True, natural=used[:-1])
    else:
        layout = shown.layout.with_places(dict(zip(shown.used, used, strict=True)))
    return TensorAxes(tuple(axes), places, layout)


def _constant(tensor: Any) -> TensorAxes:
    """Returns the axes of a tensor that depends on no input."""
    shape = tuple(getattr(tensor, "shape", ()))
    return with_unknown_axes(shape, "a constant", is_doubted=False)


def _with_batch(tensor: TensorAxes, batch: Axis) -> TensorAxes:
    """Returns a tensor with another axis of examples."""
    if not tensor.axes:
        return tensor
    return TensorAxes((batch, *tensor.axes[1:]), tensor.places, tensor.layout)


def _shape_of(tensor: Any) -> Sizes:
    return tuple(tensor.shape)


def _first_size(tensor: Any) -> int | None:
    return tensor.shape[0]


def _id(tensor: Any) -> Any:
    """Returns a name of a symbolic tensor or a constant that no other tensor has."""
    return tensor.name if hasattr(tensor, "op") else id(tensor)


def _last_sizes(shape: Any) -> set[int]:
    """Returns the sizes of the last axes of a model's inputs."""
    given = shape if isinstance(shape, list) else [shape]
    found = [tuple(each) for each in given if isinstance(each, (tuple, list)) and len(each)]
    return {each[-1] for each in found if isinstance(each[-1], int)}
