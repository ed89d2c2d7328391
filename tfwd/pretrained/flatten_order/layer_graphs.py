"""Graphs of layers: their own graphs, or graphs of traced calls, each traced once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfwd import _keras
from tfwd._keras import Graph, Node
from tfwd.pretrained.flatten_order.orders import Shape
from tfwd.pretrained.flatten_order.traced_calls import Call, is_traceable, traced_graph


class LayerGraphs:
    """Graphs of the layers of a model. None stands for a layer that has none."""

    def __init__(self) -> None:
        self._first: dict[int, Graph | None] = {}
        # By the layer's id and the shapes of its inputs: the graph of the last call.
        self._last: dict[tuple[int, tuple[Shape, ...]], Graph | None] = {}
        # The same, with the arguments that are no tensors.
        self._calls: dict[tuple[int, tuple[Shape, ...], str], Graph | None] = {}

    def of_first_call(self, layer: Any) -> Graph | None:
        """Returns the graph of a layer, or of its first call."""
        if not _needs_trace(layer):
            return _keras.layers.graph(layer)
        if id(layer) not in self._first:
            self._first[id(layer)] = traced_graph(layer)
        return self._first[id(layer)]

    def trace(self, layer: Any, shapes: Sequence[Shape], node: Node) -> None:
        """Traces a call that a graph shows, for `find`.

        Args:
            layer: Layer of the call, without wrappers.
            shapes: Shapes of the inputs.
            node: The call.
        """
        if not _needs_trace(layer):
            return
        key = id(layer), tuple(shapes)
        others = [v for v in tf.nest.flatten(node.call) if not hasattr(v, "shape")]
        call = (*key, repr(others))
        if call not in self._calls:
            found = traced_graph(layer, node.call, node.arguments)
            fits = found is not None and len(found.inputs) == len(shapes)
            self._calls[call] = found if fits else None
        self._last[key] = self._calls[call]

    def find(self, layer: Any, shapes: Sequence[Shape]) -> Graph | None:
        """Returns the graph of a layer, or of its last call with inputs of these shapes."""
        if not _needs_trace(layer):
            return _keras.layers.graph(layer)
        key = id(layer), tuple(shapes)
        if key not in self._last:  # a layer inside a `TimeDistributed`
            call: Call = tuple(tf.TensorSpec((None, *shape)) for shape in shapes), {}
            self._last[key] = traced_graph(layer, call) if len(shapes) == 1 else None
        return self._last[key]


def _needs_trace(layer: Any) -> bool:
    """Returns True for a layer that has no graph, and whose calls can be traced."""
    return is_traceable(layer) and _keras.layers.graph(layer) is None
