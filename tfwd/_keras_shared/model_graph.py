"""Graph of a functional or sequential model, in the same form for both versions of Keras."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Graph:
    """Calls of a functional or sequential model.

    Attributes:
        inputs, outputs: Symbolic tensors of the model.
        nodes: Layer or operation of each call, with its symbolic inputs and outputs. A call comes
            after the calls that it depends on.
    """

    inputs: list[Any]
    outputs: list[Any]
    nodes: list[tuple[Any, list[Any], list[Any]]]
