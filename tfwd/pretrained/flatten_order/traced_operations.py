"""TensorFlow's operations between the layers of a traced call."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfwd._keras import Node
from tfwd.pretrained.flatten_order.axes_of_operations import Axes, axes_of_result

# These operations depend on the shape of their inputs, but not on the entries.
_SIZES = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike")
_NAMES = {
    **{"BatchMatMul": "matmul", "AddN": "add", "Pack": "stack", "Unpack": "unstack"},
    "IdentityN": "identity",
}


@dataclasses.dataclass(frozen=True, eq=False)
class TracedOperation:
    """An operation of TensorFlow in the call of a layer.

    Attributes:
        symbol: str. Name of the operation in lower case, without its version.
        name: str. Name in TensorFlow's graph.
        data_format: str. Order of the axes of a convolution or pooling.
        moves_examples: bool. True if the first axis of a result is not the first axis of all
            inputs. It may then contain time steps, or parts of an image.
        variables: tuple of int. Ids of the handles of the variables that the operation reads.
        is_dense: bool. True for a product of the last axis of the only input with a matrix.
        axes: tuple of int. For each axis of the result, the axis of the only input that it was, or
            -1 for a new axis. None if the operation moves entries between axes or moves the axis of
            the examples, which is not counted here.
        keeps_last_axis: bool. True if the last axis of the result is the last axis of the only
            input, also if the axis of the examples moves.
        table_axes: int. Largest number of axes with several entries of a constant or weight in the
            operation. A weight per position has two or more.
    """

    symbol: str
    name: str
    data_format: str
    moves_examples: bool
    variables: tuple[int, ...]
    is_dense: bool
    axes: tuple[int, ...] | None
    keeps_last_axis: bool
    table_axes: int


class UnknownShape(ValueError):
    """A tensor has an unknown number of axes."""


class OperationRecorder:
    """Recorder of the operations between known tensors, in the order in which they depend.

    Args:
        known: Inputs of the call.
        captures: Pairs of a variable's handle and its placeholder, as in `FuncGraph.captures`.

    Attributes:
        nodes: Operations and layers, as in `Graph.nodes`.
        reshaped: Ids of the handles of variables that are used after a reshape.
        on_constants: Layers whose calls depend on no input.
    """

    def __init__(self, known: Iterable[tf.Tensor], captures: Iterable[tuple[Any, Any]]) -> None:
        self.nodes: list[Node] = []
        self.reshaped: set[int] = set()
        self.on_constants: list[Any] = []
        self._known: dict[str, tf.Tensor] = {}
        self._visited: set[str] = set()
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
        first = {_first_size(tensor) for tensor in (*arguments, *results)}
        constants = [tensor for tensor in inputs if tensor.name not in self._known]
        axes = axes_of_result(operation) if len(arguments) == 1 else None
        traced = TracedOperation(
            symbol=_symbol(operation.type),
            name=operation.name,
            data_format=_data_format(operation),
            moves_examples=len(first) > 1 or None in first,
            variables=tuple(v for tensor in constants for v in self._variables(tensor)),
            is_dense=_is_dense(operation, inputs, arguments),
            axes=_axes_of_example(axes),
            keeps_last_axis=axes is not None and axes[-1:] == (arguments[0].shape.rank - 1,),
            table_axes=max((_axes_with_entries(tensor) for tensor in constants), default=0),
        )
        self.nodes.append(Node(traced, arguments, list(results)))
        self._add_results(results)

    def _variables(self, tensor: tf.Tensor) -> list[int]:
        """Returns the ids of the handles of the variables from which a tensor is computed."""
        found, seen = [], set[tuple[str, bool]]()
        waiting = [(tensor, False)]
        while waiting:
            entry, is_reshaped = waiting.pop()
            if (entry.name, is_reshaped) in seen:
                continue
            seen.add((entry.name, is_reshaped))
            if entry.name in self._handles:
                found.append(self._handles[entry.name])
                self.reshaped.update(found[-1:] if is_reshaped else ())
            is_reshaped = is_reshaped or _changes_axes(entry.op)
            waiting += [(each, is_reshaped) for each in entry.op.inputs]
        return found

    def _add_results(self, results: Iterable[Any]) -> None:
        for tensor in results:
            if tensor.shape.rank is None:
                raise UnknownShape(f"{tensor.name} has an unknown number of axes")
            self._known[_name(tensor)] = tensor


def _axes_of_example(axes: Axes | None) -> Axes | None:
    """Returns axes without the first, which is the axis of the examples; None if it moves."""
    if axes is None or axes[:1] != (0,):
        return None
    return tuple(axis - 1 if axis > 0 else axis for axis in axes[1:])


def _symbol(kind: str) -> str:
    """Returns the name of a kind of operation without its version, such as "add" for "AddV2"."""
    kind = re.sub(r"V\d+$", "", kind)
    return _NAMES.get(kind, kind.lower())


def _data_format(operation: tf.Operation) -> str:
    """Returns the order of the axes that an operation has as an attribute."""
    try:
        text = operation.get_attr("data_format")
    except ValueError:
        return "channels_last"
    return "channels_first" if text.startswith(b"NC") else "channels_last"


def _changes_axes(operation: tf.Operation) -> bool:
    """Returns True for a reshape that changes more than axes of size 1."""
    if operation.type != "Reshape":
        return False
    shapes = operation.inputs[0].shape, operation.outputs[0].shape
    before, after = ([size for size in shape if size != 1] for shape in shapes)
    return before != after


def _is_dense(operation: tf.Operation, inputs: list[Any], arguments: list[Any]) -> bool:
    """Returns True for a product of the last axis of the only argument with a matrix."""
    if _symbol(operation.type) != "matmul" or len(arguments) != 1:
        return False
    flag = "transpose_a" if operation.type == "MatMul" else "adj_x"
    return inputs[0].name == arguments[0].name and not operation.get_attr(flag)


def _axes_with_entries(tensor: tf.Tensor) -> int:
    """Returns the number of axes that are not of size 1. Equal entries have no order."""
    if tensor.op.type in ("ZerosLike", "OnesLike", "Fill"):
        return 0
    return sum(size != 1 for size in tensor.shape) if tensor.shape.rank is not None else 0


def _first_size(tensor: tf.Tensor) -> int | None:
    return tensor.shape[0] if tensor.shape.rank else None


def _name(tensor: Any) -> str:
    """Returns a name for a symbolic tensor or a constant that no other tensor has."""
    return tensor.name if hasattr(tensor, "op") else str(id(tensor))
