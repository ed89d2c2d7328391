"""TensorFlow's operations between the layers of a traced call."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfwd import _keras

# These operations depend on the shape of their inputs, but not on the entries.
_SIZES = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike")


@dataclasses.dataclass(frozen=True, eq=False)
class TracedOperation:
    """An operation of TensorFlow in the call of a layer.

    Attributes:
        operation: The operation, in the graph of the trace.
        is_known: tuple of bool. For each input, True if it depends on the inputs of the call. Other
            inputs are constants or weights.
        variables: tuple of int. Ids of the handles of the variables that the operation reads.
        layer_name: str. Name of the layer of Keras without weights that calls it, or "".
    """

    operation: tf.Operation
    is_known: tuple[bool, ...]
    variables: tuple[int, ...]
    layer_name: str = ""

    @property
    def kind(self) -> str:
        """Returns the name of the kind of operation, without its version, as in "BatchMatMul"."""
        return re.sub(r"V\d+$", "", self.operation.type)

    @property
    def name(self) -> str:
        """Returns the name of the layer that calls it, or the name in TensorFlow's graph."""
        return self.layer_name or self.operation.name


@dataclasses.dataclass(frozen=True)
class Node:
    """A call in a graph.

    Attributes:
        operation: A layer, or a `TracedOperation`.
        arguments: Tensors that depend on the inputs of the graph.
        results: Tensors that it returns.
    """

    operation: Any
    arguments: list[Any]
    results: list[Any]


@dataclasses.dataclass(frozen=True)
class Graph:
    """The calls that a call of a layer makes.

    Attributes:
        inputs, outputs: Symbolic tensors of the layer.
        nodes: Calls. A call comes after the calls that it depends on.
        callers: Layers whose calls are not in `nodes`, because the calls that they make are.
        reshaped: Ids of the handles of variables that are reshaped before they are used.
    """

    inputs: list[Any]
    outputs: list[Any]
    nodes: list[Node]
    callers: list[Any]
    reshaped: set[int]


class UnknownShape(ValueError):
    """A tensor has an unknown number of axes."""


class OperationRecorder:
    """Recorder of the operations between known tensors, in the order in which they depend.

    Args:
        known: Inputs of the call.
        captures: Pairs of a variable's handle and its placeholder, as in `FuncGraph.captures`.
        layer_names: Names of the layers that call operations, by the operation's name.

    Attributes:
        nodes: Operations and layers, as in `Graph.nodes`.
        reshaped: Ids of the handles of variables that are used after a reshape.
        on_constants: Layers whose calls depend on no input.
    """

    def __init__(
        self,
        known: Iterable[tf.Tensor],
        captures: Iterable[tuple[Any, Any]],
        layer_names: dict[str, str],
    ) -> None:
        self._layer_names = layer_names
        self.nodes: list[Node] = []
        self.reshaped: set[int] = set()
        self.on_constants: list[Any] = []
        self._known: dict[str, tf.Tensor] = {}
        self._visited: set[str] = set()
        # For the results of layers on constants: the ids of the handles of the layer's variables.
        self._of_constants: dict[str, list[int]] = {}
        self._handles = {inner.name: id(handle) for handle, inner in captures}
        self._add_results(known)

    def add_layer(self, layer: Any, arguments: Sequence[Any], results: Sequence[Any]) -> None:
        """Adds the call of a layer, after the operations that its arguments need.

        A layer on constants, such as the numbers of positions, is not added. Its results have no
        axis of examples.
        """
        given = self.tensors(arguments)
        if not any(_name(tensor) in self._known for tensor in given):
            self.on_constants.append(layer)
            variables = [
                v
                for weight in _keras.variables.weights(layer)
                for v in _keras.variables.tf_variables(weight)
            ]
            handles = [id(variable.handle) for variable in variables]
            self._of_constants |= {_name(tensor): handles for tensor in results}
            return
        self.nodes.append(Node(layer, given, list(results)))
        self._add_results(results)

    def tensors(self, needed: Sequence[Any]) -> list[Any]:
        """Adds the operations that tensors need. Returns the tensors as they are in `nodes`."""
        symbolic = [tensor for tensor in needed if hasattr(tensor, "op")]
        for tensor in symbolic:
            self._visit(tensor)
            if tensor.name not in self._known:
                self._variables(tensor)
        return [self._known.get(_name(tensor), tensor) for tensor in needed]

    def _visit(self, tensor: tf.Tensor) -> None:
        waiting = [tensor]
        while waiting:
            operation = waiting[-1].op
            if waiting[-1].name in self._known or operation.name in self._visited:
                waiting.pop()
                continue
            inputs = [] if operation.type in _SIZES else list(operation.inputs)
            unknown = [t for t in inputs if t.name not in self._known]
            unknown = [t for t in unknown if t.op.name not in self._visited]
            waiting += unknown
            if not unknown:
                self._visited.add(operation.name)
                self._add_operation(operation, inputs)

    def _add_operation(self, operation: tf.Operation, inputs: list[tf.Tensor]) -> None:
        if operation.type == "IdentityN":  # each output is one input
            for entry, result in zip(inputs, operation.outputs, strict=True):
                self._add_node(operation, [entry], [result])
        else:
            self._add_node(operation, inputs, operation.outputs)

    def _add_node(
        self, operation: tf.Operation, inputs: list[tf.Tensor], results: list[tf.Tensor]
    ) -> None:
        arguments = [self._known[t.name] for t in inputs if t.name in self._known]
        if not arguments:
            return
        constants = [tensor for tensor in inputs if tensor.name not in self._known]
        variables = tuple(v for tensor in constants for v in self._variables(tensor))
        is_known = tuple(tensor.name in self._known for tensor in inputs)
        layer_name = self._layer_names.get(operation.name, "")
        traced = TracedOperation(operation, is_known, variables, layer_name)
        self.nodes.append(Node(traced, arguments, list(results)))
        self._add_results(results)

    def _variables(self, tensor: tf.Tensor) -> list[int]:
        """Returns the ids of the handles of the variables from which a tensor is computed."""
        found, seen = [], set[tuple[str, bool, bool]]()
        waiting = [(tensor, False, False)]
        while waiting:
            key = entry, is_reshaped, is_divided = waiting.pop()
            if (entry.name, *key[1:]) in seen:
                continue
            seen.add((entry.name, *key[1:]))
            if entry.name in self._of_constants:
                # Not the layer's weights are reshaped, but its outputs.
                self.reshaped.update(self._of_constants[entry.name] if is_divided else ())
                continue
            if entry.name in self._handles:
                found.append(self._handles[entry.name])
                self.reshaped.update(found[-1:] if is_reshaped else ())
            is_divided = is_divided or _changes_last_axis(entry.op)
            is_reshaped = is_reshaped or _changes_axes(entry.op)
            inputs = [] if entry.op.type in _SIZES else entry.op.inputs
            waiting += [(each, is_reshaped, is_divided) for each in inputs]
        return found

    def _add_results(self, results: Iterable[Any]) -> None:
        for tensor in results:
            if tensor.shape.rank is None:
                raise UnknownShape(f"{tensor.name} has an unknown number of axes")
            self._known[_name(tensor)] = tensor


def _changes_axes(operation: tf.Operation) -> bool:
    """Returns True for a reshape that changes more than axes of size 1."""
    before, after = _sizes(operation)
    return before != after


def _changes_last_axis(operation: tf.Operation) -> bool:
    """Returns True for a reshape that divides the last axis, or merges it with others."""
    before, after = _sizes(operation)
    return before[-1:] != after[-1:]


def _sizes(operation: tf.Operation) -> tuple[list[Any], list[Any]]:
    """Returns the sizes of the axes before and after a reshape, without axes of size 1."""
    if operation.type != "Reshape":
        return [], []
    shapes = operation.inputs[0].shape, operation.outputs[0].shape
    before, after = ([size for size in shape if size != 1] for shape in shapes)
    return before, after


def _name(tensor: Any) -> str:
    """Returns a name for a symbolic tensor or a constant that no other tensor has."""
    return tensor.name if hasattr(tensor, "op") else str(id(tensor))


def value_of_constant(tensor: tf.Tensor) -> Any:
    """Returns the value of a tensor that depends on no input and no variable; else None."""
    value = tf.get_static_value(tensor)
    if value is not None:
        return value
    waiting, seen = [tensor.op], set()
    while waiting:
        operation = waiting.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        if operation.type in ("Placeholder", "VarHandleOp") or len(seen) > 100:
            return None
        waiting += [each.op for each in operation.inputs]
    with tf.compat.v1.Session(graph=tensor.graph) as session:
        return session.run(tensor)
