"""Graph of a functional or sequential model, in the same form for both versions of Keras."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Node:
    """A call in a graph.

    Attributes:
        operation: Layer or operation.
        arguments, results: Symbolic tensors.
        call: Positional and named arguments of the call, as the model's code gives them. None if
            they are not known.
    """

    operation: Any
    arguments: list[Any]
    results: list[Any]
    call: tuple[tuple, dict[str, Any]] | None = None


@dataclasses.dataclass(frozen=True)
class Graph:
    """Calls of a functional or sequential model, or the traced calls of another layer.

    Attributes:
        inputs, outputs: Symbolic tensors of the model.
        nodes: Calls. A call comes after the calls that it depends on.
        callers: Layers whose calls are not in `nodes`, because the calls that they make are.
        reshaped: Ids of the handles of variables that are reshaped before they are used.
    """

    inputs: list[Any]
    outputs: list[Any]
    nodes: list[Node]
    callers: list[Any] = dataclasses.field(default_factory=list)
    reshaped: set[int] = dataclasses.field(default_factory=set)


def in_order_of_inputs(given: Any, names: list[str], tensors: list[Any]) -> list[Any]:
    """Returns the input tensors of a call of a model, in the order of the model's inputs.

    Args:
        given: First argument of the call. The order differs only if this argument is a dict.
        names: Names of the model's inputs, in their order. Empty for a layer without a graph.
        tensors: Input tensors of the call, in Keras's order.
    """
    if not isinstance(given, dict) or set(given) != set(names) or len(names) != len(tensors):
        return tensors
    return [given[name] for name in names]
