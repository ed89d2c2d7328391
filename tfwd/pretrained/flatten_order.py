"""Order of features where a model flattens an image, which is another order in PyTorch.

PyTorch flattens `[channels, height, width]`, and Keras `[height, width, channels]`. The weights of
the next layer therefore have their rows in another order. The same holds for the outputs of a
`Dense` layer that are reshaped to an image. Both are read from the graph of the model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from tfwd import _keras

Axes = tuple[int, ...]  # for each axis of a tensor after the first, its position in PyTorch
Shape = tuple[int, ...]  # without the first axis, as all shapes here


@dataclasses.dataclass(frozen=True)
class Flat:
    """Order of the features on an axis that was flattened, or will be reshaped.

    Attributes:
        shape: the sizes of the flattened axes, in Keras's order.
        axes: the position of each of these axes in PyTorch's order.
    """

    shape: Shape
    axes: Axes

    @property
    def there(self) -> Shape:
        """Returns the sizes in PyTorch's order."""
        return tuple(self.shape[axis] for axis in self.order)

    @property
    def order(self) -> Axes:
        """Returns the axes of `shape` in PyTorch's order."""
        return tuple(sorted(range(len(self.axes)), key=self.axes.__getitem__))


@dataclasses.dataclass(frozen=True)
class Unclear:
    """Order of features that the model does not show.

    Attributes:
        why: the reason, a clause.
    """

    why: str


@dataclasses.dataclass(frozen=True)
class Doubt:
    """Unknown order of the axes that a custom layer returns, which matters once they are flattened.

    Attributes:
        why: the reason, a clause.
    """

    why: str


# None: unknown, or nothing was flattened.
Order = Axes | Flat | Unclear | Doubt | None
Features = Flat | Unclear | None


@dataclasses.dataclass
class Orders:
    """Orders of the inputs and outputs of a layer; None if they are the orders of PyTorch."""

    inputs: Features = None
    outputs: Features = None


def _kinds(*names: str) -> tuple[Any, ...]:
    """Returns the Keras layers of these names. Older releases lack some."""
    return tuple(getattr(keras.layers, name) for name in names if hasattr(keras.layers, name))


def _ranked(*names: str, ranks: Iterable[int] = (1, 2, 3)) -> tuple[Any, ...]:
    return _kinds(*(name.format(rank) for name in names for rank in ranks))


_IMAGES = (
    *_ranked("Conv{}D", "Conv{}DTranspose", "SeparableConv{}D", "DepthwiseConv{}D"),
    *_ranked("MaxPooling{}D", "AveragePooling{}D", "UpSampling{}D", "ZeroPadding{}D"),
    *_ranked("Cropping{}D", "GlobalMaxPooling{}D", "GlobalAveragePooling{}D"),
    *_ranked("AdaptiveMaxPooling{}D", "AdaptiveAveragePooling{}D"),
)
_IMAGE_SEQUENCES = _ranked("ConvLSTM{}D")
_SEQUENCES = _kinds(
    *("Embedding", "RNN", "Bidirectional", "MultiHeadAttention", "GroupQueryAttention"),
    *("Attention", "AdditiveAttention", "EinsumDense"),
)
_CONCATENATION = _kinds("Concatenate")
_MERGES = _kinds("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum")
ENTRYWISE = (
    *_kinds("Activation", "ReLU", "LeakyReLU", "ELU", "PReLU", "Softmax", "Dropout", "Identity"),
    *_kinds("AlphaDropout", "GaussianDropout", "GaussianNoise", "ActivityRegularization"),
    *_kinds("BatchNormalization", "LayerNormalization", "GroupNormalization", "Normalization"),
    *_kinds("RMSNormalization", "UnitNormalization", "Rescaling", "Masking"),
    *_ranked("SpatialDropout{}D"),
)
# Operations on one tensor that move entries although shapes may stay the same.
_MOVING = (
    *("transpose", "permute", "flip", "reverse", "roll", "swapaxes", "moveaxis", "sort", "rot90"),
    *("dot", "matmul", "einsum", "tensordot", "gather", "take"),
)


def flattened_order(shape: Shape, axes: Axes) -> Flat | None:
    """Returns the order of flattened features; None if PyTorch's is the same.

    Args:
        shape: the sizes of the axes, in Keras's order.
        axes: the position of each of them in PyTorch's order.
    """
    kept = [(axis, size) for axis, size in zip(axes, shape, strict=True) if size != 1]
    there = sorted(axis for axis, _ in kept)
    positions = tuple(there.index(axis) for axis, _ in kept)
    if positions == tuple(range(len(positions))):
        return None
    return Flat(tuple(size for _, size in kept), positions)


def given_order(shape: Shape) -> Flat | None:
    """Returns the order of the features of an image whose shape in PyTorch a mapping gives."""
    return flattened_order((*shape[1:], *shape[:1]), _image(len(shape))) if shape else None


def orders_of(model: keras.layers.Layer) -> dict[int, Orders]:
    """Returns the orders of the inputs and outputs of layers that differ from PyTorch's, by id."""
    walk = _Walk()
    walk.everything(model)
    return {key: orders for key, orders in walk.found.items() if orders.inputs or orders.outputs}


class _Walk:
    """Walk through the graphs of a model: forward from inputs, then backward from outputs.

    Attributes:
        found: the orders by the id of the layer that owns weights.
    """

    def __init__(self) -> None:
        self.found: dict[int, Orders] = {}
        self._seen: set[int] = set()  # layers in graphs
        self._noted: set[tuple[int, str]] = set()

    def everything(self, model: Any) -> None:
        loose: list[Any] = []
        self._graphs(model, loose)
        self._without_graph([layer for layer in loose if id(layer) not in self._seen])

    def _graphs(self, layer: Any, loose: list[Any]) -> None:
        if id(layer) in self._seen:
            return
        graph = _keras.layers.graph(layer)
        if graph is not None:
            self._forward(graph, [None] * len(graph.inputs))
            self._backward(graph, [None] * len(graph.outputs))
        else:
            loose.append(layer)
        for held in _keras.layers.sublayers(layer):
            self._graphs(held, loose)

    def _without_graph(self, layers: list[Any]) -> None:
        """Notes layers of a subclassed model that may take what a `Flatten` layer returns."""
        images = [layer for layer in layers if isinstance(layer, _IMAGES)]
        for layer in layers:
            if not isinstance(layer, keras.layers.Flatten) or not images:
                continue
            shape = tuple((_keras.layers.called_shape(layer) or ())[1:])
            if len(shape) < 2 or None in shape or not flattened_order(shape, _image(len(shape))):
                continue
            for owner in layers:
                weights = _keras.layers.held_weights(owner)
                if any(tuple(w.shape)[:1] == (math.prod(shape),) for w in weights):
                    why = f"'{layer.name}' flattens {shape}, maybe for this layer"
                    self._note(owner, "inputs", Unclear(why))

    def _forward(self, graph: Any, given: Sequence[Order]) -> list[Order]:
        orders: dict[int, Order] = dict(zip(map(id, graph.inputs), given, strict=True))
        for operation, inputs, outputs in graph.nodes:
            layer = _unwrapped(operation)
            shapes = [_shape_of(tensor) for tensor in inputs]
            got = [orders.get(id(tensor)) for tensor in inputs]
            results = [_shape_of(tensor) for tensor in outputs]
            orders.update(
                zip(map(id, outputs), self._through(layer, got, shapes, results), strict=False)
            )
        return [orders.get(id(tensor)) for tensor in graph.outputs]

    def _through(
        self, layer: Any, got: list[Order], shapes: list[Shape], results: list[Shape]
    ) -> list[Order]:
        """Returns the orders of a layer's outputs, and notes the orders of its inputs."""
        graph = _keras.layers.graph(layer)
        if graph is not None:
            self._seen.add(id(layer))
            if len(graph.inputs) != len(got):
                return [None] * len(results)
            return self._forward(graph, got)
        if isinstance(layer, keras.layers.TimeDistributed):
            self._seen.add(id(layer))
            inner = _unwrapped(layer.layer)
            later = self._through(
                inner, [_after_first(order) for order in got], _tails(shapes), _tails(results)
            )
            return [_behind_first(order) for order in later]
        self._see(layer)
        flat = [order for order in got if isinstance(order, (Flat, Unclear))]
        if isinstance(layer, keras.layers.Layer):
            self._note_inputs(layer, flat, shapes)
        if not got or not results:
            return [None] * len(results)
        return [self._order(layer, got, flat, shapes, results[0]), *[None] * (len(results) - 1)]

    def _order(
        self,
        layer: Any,
        got: list[Order],
        flat: list[Any],
        shapes: list[Shape],
        result: Shape,
    ) -> Order:
        """Returns the order of a layer's first output."""
        order, shape = got[0], shapes[0]
        if isinstance(layer, (*_IMAGES, *_IMAGE_SEQUENCES)):
            return _image_of(layer, len(result)) if len(result) > 1 else None
        if isinstance(layer, _SEQUENCES):
            return tuple(range(len(result))) if len(result) > 1 else None
        if isinstance(layer, keras.layers.Dense):
            if len(result) < 2:
                return None
            if _is_image(order, shape):  # PyTorch's layer has channels last
                return Doubt(f"'{layer.name}' is on the channels of an image of {shape}")
            return order if isinstance(order, Doubt) else tuple(range(len(result)))
        if isinstance(layer, keras.layers.Flatten):
            first = getattr(layer, "data_format", "channels_last") == "channels_first"
            return _flattened(order, shape, layer.name, first)
        is_reshape = isinstance(layer, keras.layers.Reshape)
        if is_reshape or _operation(layer) == "reshape":
            if len(result) == 1:
                return _flattened(order, shape, layer.name, False)
            return _reshaped(order, shape, result, layer.name)
        if isinstance(layer, keras.layers.Permute):
            if flat:
                return Unclear(f"'{layer.name}' changes flattened features")
            return _permuted(order, [i - 1 for i in layer.dims], layer.name)
        if isinstance(layer, _CONCATENATION) or _operation(layer) in ("concatenate", "concat"):
            if flat:
                return Unclear(f"'{layer.name}' joins flattened features with others")
            return order if all(other == order for other in got) else None
        if result in shapes and not _moves(layer) and (order or not _has_convolutions(layer)):
            return _merged(layer, got, shapes, result)
        if flat:
            return Unclear(f"'{layer.name}' changes flattened features")
        if len(result) > 1:
            if _is_image(order, shape):
                return Doubt(f"'{layer.name}' changes the axes of an image of {shape}")
            inside = f"'{layer.name}' has convolutions inside, and may return an image"
            if _has_convolutions(layer):
                return Doubt(inside)
            return order if isinstance(order, Doubt) else None
        if len(result) == 1 and _has_convolutions(layer) and not _has_units(layer, result[0]):
            return Unclear(f"'{layer.name}' has convolutions inside, and may flatten an image")
        if len(result) != 1 or not isinstance(order, tuple) or None in shape:
            return None  # (A tensor of unknown length does not become features.)
        if math.prod(shape) != result[0]:
            return None
        return (
            Unclear(f"'{layer.name}' flattens {shape}") if flattened_order(shape, order) else None
        )

    def _note_inputs(self, layer: Any, flat: list[Any], shapes: list[Shape]) -> None:
        """Notes the order of the inputs of a layer with weights."""
        if isinstance(layer, keras.layers.Bidirectional):
            rnns = [layer.forward_layer, layer.backward_layer]
        else:
            rnns = [layer] if isinstance(layer, keras.layers.RNN) else []
        order: Features = None
        if flat:
            same = all(other == flat[0] for other in flat) and len(flat) == len(shapes)
            order = flat[0] if same else Unclear(f"'{layer.name}' has several inputs")
        if rnns:
            for rnn in rnns:
                cell = rnn.cell
                self._note(getattr(cell, "cells", [cell])[0], "inputs", order)
        elif isinstance(layer, (keras.layers.Dense, *ENTRYWISE)):
            self._note(layer, "inputs", order)
        elif flat:
            why = f"'{layer.name}' has flattened features as inputs"
            for owner in _keras.layers.all_layers(layer):
                weights = _keras.layers.held_weights(owner)
                sizes = {shape[-1] for shape in shapes if shape}
                if any(tuple(w.shape) and w.shape[0] in sizes for w in weights):
                    self._note(owner, "inputs", Unclear(why))

    def _backward(self, graph: Any, wanted: Sequence[Order]) -> list[Order]:
        """Notes the layers whose outputs become images.

        Args:
            graph: the graph of a model.
            wanted: the orders that later layers want of the model's outputs.

        Returns:
            The orders that the model wants of its inputs.
        """
        wants: dict[int, list[Order]] = {}
        for tensor, order in zip(graph.outputs, wanted, strict=True):
            wants.setdefault(id(tensor), []).append(order)
        for operation, inputs, outputs in reversed(graph.nodes):
            layer = _unwrapped(operation)
            later = [_agreed(wants.get(id(tensor), [])) for tensor in outputs]
            shapes = [_shape_of(tensor) for tensor in inputs]
            inner = _keras.layers.graph(layer)
            if inner and (len(inner.inputs), len(inner.outputs)) == (len(inputs), len(outputs)):
                orders = self._backward(inner, later)
            elif inner is None and later:
                result = _shape_of(outputs[0])
                orders = [self._wanted(layer, later[0], shape, result) for shape in shapes]
            else:
                orders = [None] * len(inputs)
            for tensor, order in zip(inputs, orders, strict=True):
                wants.setdefault(id(tensor), []).append(order)
        return [_agreed(wants.get(id(tensor), [])) for tensor in graph.inputs]

    def _wanted(self, layer: Any, later: Order, shape: Shape, result: Shape) -> Order:
        """Returns the order that a layer wants of an input, and notes the order of its outputs."""
        flat = isinstance(later, (Flat, Unclear))
        if isinstance(layer, keras.layers.TimeDistributed):
            inner, after = _unwrapped(layer.layer), _after_first(later)
            graph = _keras.layers.graph(inner)
            if graph is None:
                return _behind_first(self._wanted(inner, after, shape[1:], result[1:]))
            if (len(graph.inputs), len(graph.outputs)) == (1, 1):
                return _behind_first(self._backward(graph, [after])[0])
        if isinstance(layer, (*_IMAGES, *_IMAGE_SEQUENCES)):
            return _image_of(layer, len(shape)) if len(shape) > 1 else None
        if isinstance(layer, keras.layers.Dense):
            self._note(layer, "outputs", later if flat else None)  # type: ignore[arg-type]
            if len(shape) < 2:
                return None
            return later if isinstance(later, tuple) else tuple(range(len(shape)))
        if isinstance(layer, keras.layers.Reshape) or _operation(layer) == "reshape":
            if len(shape) == 1 and len(result) > 1:
                return _flattened(later, result, layer.name, False)
            return _reshaped(later, result, shape, layer.name)
        if isinstance(layer, keras.layers.Permute):
            if flat:
                return Unclear(f"'{layer.name}' changes the features before they become an image")
            places = [layer.dims.index(i + 1) for i in range(len(shape))]
            return _permuted(later, places, layer.name)
        if isinstance(layer, _SEQUENCES) and len(shape) > 1:
            if flat:
                self._note_outputs(layer)
            return tuple(range(len(shape)))
        if isinstance(layer, _CONCATENATION):
            why = f"'{layer.name}' joins the outputs with others, before they become an image"
            return Unclear(why) if flat else later
        if shape == result and isinstance(layer, ENTRYWISE):
            if flat:
                self._note(layer, "inputs", later)  # type: ignore[arg-type]
            return later
        if shape == result and not _moves(layer) and not _keras_weights(layer):
            return later
        if flat and _keras_weights(layer):
            self._note_outputs(layer)
        elif flat and shape and math.prod(size or 0 for size in shape) != 1:
            name = getattr(layer, "name", "")
            return Unclear(f"'{name}' changes the features before they become an image")
        return None

    def _note_outputs(self, layer: Any) -> None:
        """Notes that tfwd does not know the order of the outputs of a layer with weights."""
        why = f"its outputs become an image after '{layer.name}'"
        for owner in _keras.layers.all_layers(layer):
            self._note(owner, "outputs", Unclear(why))

    def _see(self, layer: Any) -> None:
        if isinstance(layer, keras.layers.Layer):
            self._seen.update(map(id, _keras.layers.all_layers(layer)))

    def _note(self, layer: Any, side: str, order: Features) -> None:
        """Notes an order. A layer that is called with different orders has an unclear one."""
        orders = self.found.setdefault(id(layer), Orders())
        if (id(layer), side) in self._noted and getattr(orders, side) != order:
            order = Unclear("the model calls the layer on features in several orders")
        if order is not None or (side == "inputs" and isinstance(layer, keras.layers.Dense)):
            self._noted.add((id(layer), side))
        setattr(orders, side, order)


def _flattened(order: Order, shape: Shape, name: str, channels_first: bool) -> Order:
    """Returns the order of the features of a flattened tensor, or of one that is reshaped.

    Args:
        order: the order of its axes.
        shape: its shape.
        name: str. The name of the layer.
        channels_first: bool. Keras's `Flatten` then moves the first axis behind the others.
    """
    if isinstance(order, (Flat, Unclear)):
        return order
    if None in shape or sum(size != 1 for size in shape) < 2:
        return None
    if isinstance(order, Doubt):
        return Unclear(order.why)
    if order is None:
        if len(shape) < 3 and not channels_first:
            return None
        # An image of one channel, or of one position, has the same order in both.
        if not flattened_order(shape, _image(len(shape))) and not channels_first:
            return None
        return Unclear(f"the model does not show what the axes of {shape} at '{name}' are")
    if channels_first:
        shape, order = (*shape[1:], shape[0]), (*order[1:], order[0])
    return flattened_order(shape, order)


def _reshaped(order: Order, shape: Shape, result: Shape, name: str) -> Order:
    """Returns the order of the axes of a tensor after a reshape to several axes.

    Args:
        order: the order of the axes before.
        shape, result: the shapes before and after.
        name: str. The name of the layer.
    """
    if result == shape:
        return order
    if isinstance(order, Flat):
        if result[-1] == shape[-1]:
            return order
        if result == order.shape:
            return order.axes
        why = f"'{name}' changes flattened features"
        return Doubt(why) if result[-1] == order.shape[-1] else Unclear(why)
    if _is_image(order, shape):
        why = f"'{name}' is a reshape between an image of {shape} and {result}"
    elif isinstance(order, Doubt):
        why = order.why
    else:
        return None
    size, at = 1, len(shape)
    while at and size != result[-1] and shape[at - 1] is not None:
        at -= 1
        size *= shape[at]
    last = shape[at:]  # the axes that become the last one
    if size != result[-1]:
        is_same = bool(result[-1] and shape[-1]) and shape[-1] % result[-1] == 0  # it is divided
    elif isinstance(order, Doubt):
        is_same = sum(size != 1 for size in last) < 2
    else:
        is_same = isinstance(order, tuple) and flattened_order(last, order[at:]) is None
    return Doubt(why) if is_same else Unclear(why)


def _permuted(order: Order, places: Sequence[int], name: str) -> Order:
    """Returns the order of the axes of a tensor after a permutation.

    A `Permute` may only bring an image into PyTorch's order of axes. Any other `Permute` may also
    be in PyTorch's model.

    Args:
        order: the order of the axes before.
        places: for each axis, its position before.
        name: str. The name of the layer.
    """
    if not isinstance(order, tuple):
        return order if isinstance(order, Doubt) else None
    permuted = tuple(order[place] for place in places)
    if permuted in (order, tuple(range(len(order)))):
        return permuted
    return Doubt(f"the model does not show whether PyTorch's model also permutes as '{name}' does")


def _merged(layer: Any, got: list[Order], shapes: list[Shape], result: Shape) -> Order:
    """Returns the order of a result that combines the entries of its inputs one by one."""
    orders = [order for order, shape in zip(got, shapes, strict=True) if shape == result]
    if all(order == orders[0] for order in orders):
        changed = _keras_weights(layer) and not isinstance(layer, ENTRYWISE)
        if changed and isinstance(orders[0], (Flat, Unclear)):
            return Unclear(f"'{layer.name}' changes flattened features")
        return orders[0]
    if any(isinstance(order, (Flat, Unclear)) for order in orders):
        return Unclear(f"'{layer.name}' combines flattened features with others")
    known = {order for order in orders if order is not None}
    return known.pop() if len(known) == 1 else None


def _agreed(orders: list[Order]) -> Order:
    """Returns the order that all later layers want of a tensor."""
    if not orders or all(order == orders[0] for order in orders):
        return orders[0] if orders else None
    if any(isinstance(order, (Flat, Unclear)) for order in orders):
        return Unclear("its outputs become an image, and other layers use them too")
    known = {order for order in orders if order is not None}
    return known.pop() if len(known) == 1 else None


def _is_image(order: Order, shape: Shape) -> bool:
    """Returns True if PyTorch would flatten a tensor in another order."""
    return isinstance(order, tuple) and flattened_order(shape, order) is not None


def _image(rank: int) -> Axes:
    return (*range(1, rank), 0)


def _image_of(layer: Any, rank: int) -> Axes:
    if isinstance(layer, _IMAGE_SEQUENCES):
        if rank > layer.cell.rank + 1:  # with an axis of time before the image
            return (0, *(axis + 1 for axis in _image_of(layer.cell, rank - 1)))
        layer = layer.cell
    first = getattr(layer, "data_format", "channels_last") == "channels_first"
    return tuple(range(rank)) if first else _image(rank)


def _after_first(order: Order) -> Order:
    """Returns the order of the part of a tensor that `TimeDistributed` hands on."""
    if not isinstance(order, tuple):
        return order
    there = sorted(order[1:])
    return tuple(there.index(axis) for axis in order[1:])


def _behind_first(order: Order) -> Order:
    return (0, *(axis + 1 for axis in order)) if isinstance(order, tuple) else order


def _tails(shapes: list[Shape]) -> list[Shape]:
    return [shape[1:] for shape in shapes]


def _shape_of(tensor: Any) -> Shape:
    """Returns the shape without the first axis; empty if the number of axes is unknown."""
    shape = tensor.shape
    return () if getattr(shape, "rank", 0) is None else tuple(shape)[1:]


def _unwrapped(layer: Any) -> Any:
    while isinstance(layer, _keras.layers.Wraps):
        layer = layer.layer
    return layer


def _operation(operation: Any) -> str:
    """Returns the name of a function in a graph; "" for a layer."""
    symbol = getattr(operation, "symbol", None)  # of Keras 2
    if isinstance(symbol, str):
        return symbol.rpartition(".")[2].lower()
    return "" if isinstance(operation, keras.layers.Layer) else type(operation).__name__.lower()


def _moves(layer: Any) -> bool:
    name = _operation(layer)
    return any(word in name for word in _MOVING)


def _has_convolutions(layer: Any) -> bool:
    """Returns True for a custom layer around layers of images."""
    if not isinstance(layer, keras.layers.Layer):
        return False
    return any(isinstance(held, _IMAGES) for held in _keras.layers.all_layers(layer))


def _has_units(layer: Any, count: int | None) -> bool:
    """Returns True if a weight of a layer has as many outputs: then the layer flattens nothing."""
    return any(tuple(weight.shape)[-1:] == (count,) for weight in layer.weights)


def _keras_weights(layer: Any) -> list[Any]:
    return list(layer.weights) if isinstance(layer, keras.layers.Layer) else []
