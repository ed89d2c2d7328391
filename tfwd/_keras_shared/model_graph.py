"""Graph of a functional or sequential model, in the same form for both versions of Keras."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Graph:
    """Calls of a functional or sequential model, or the traced calls of another layer.

    Attributes:
        inputs, outputs: Symbolic tensors of the model.
        nodes: Layer or operation of each call, with its symbolic inputs and outputs. A call comes
            after the calls that it depends on.
        callers: Layers whose calls are not in `nodes`, because the calls that they make are.
    """

    inputs: list[Any]
    outputs: list[Any]
    nodes: list[tuple[Any, list[Any], list[Any]]]
    callers: list[Any] = dataclasses.field(default_factory=list)


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
