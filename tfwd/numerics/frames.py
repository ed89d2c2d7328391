"""What is looked at in a step of training, and how a report names it."""

from __future__ import annotations

from typing import Any, NamedTuple

# The order of computation, which is that of a report.
KINDS = (
    "data",
    "weight",
    "argument",
    "input",
    "pre-activation",
    "output",
    "prediction",
    "added loss",
    "loss",
    "gradient",
    "weight gradient",
    "learning rate",
    "update",
)
FORWARD = (
    *("data", "weight", "argument", "input", "pre-activation", "output", "prediction"),
    *("added loss", "loss"),
)
BACKWARD = ("gradient", "weight gradient")


class Frame(NamedTuple):
    """A tensor of a step.

    Attributes:
        kind: one of `KINDS`.
        name: a layer's path, as `encoder/dense_2`; a weight's; `x`, `y[0]` for data.
        layer: the class of the layer, or an empty string.
        dtype: the tensor's.
        source: of a gradient of a layer's output, the layers that it comes from; of a loss, the
            names of the loss functions.
        outputs: of a loss, the model's outputs that it is of, where they are known among several.
        call: of a layer that is called several times in a step, which call it is, from 1.
        rule: of a layer's argument that the layer checks, what the layer demands. The tensor is NaN
            where the argument is wrong.
    """

    kind: str
    name: str
    layer: str = ""
    dtype: str = "float32"
    source: tuple[str, ...] = ()
    call: int = 1
    outputs: tuple[str, ...] = ()
    rule: str = ""

    @property
    def direction(self) -> str:
        """ "forward", "backward" or "update"."""
        if self.kind in FORWARD:
            return "forward"
        return "backward" if self.kind in BACKWARD else "update"

    @property
    def label(self) -> str:
        """The name in a table or a plot."""
        return self.kind if self.name == self.kind else f"{self.name}{self._which}, {self.kind}"

    @property
    def of_outputs(self) -> str:
        """Of a loss, the outputs in words: " of output 'head'"."""
        if not self.outputs:
            return ""
        names = " and ".join(map(repr, self.outputs))
        return f" of output{'s' * (len(self.outputs) > 1)} {names}"

    @property
    def _which(self) -> str:
        return f" (call {self.call})" if self.call > 1 else ""

    @property
    def _giver(self) -> str:
        """Of a gradient, what gives it back to which layer."""
        to = f"'{self.name}'{self._which}"
        if not self.source:
            return f"what follows layer {to} (the loss, or no layer): backward gradient"
        sources = f"layer{'s' * (len(self.source) > 1)} {' and '.join(map(repr, self.source))}"
        return f"{sources}: backward gradient for the output of {to}"

    @property
    def subject(self) -> str:
        """What has the elements, as a sentence begins."""
        layer = f"layer '{self.name}'{self._which}:"
        sources = " and ".join(map(repr, self.source))
        return {
            "data": f"data '{self.name}':",
            "weight": f"weight '{self.name}':",
            "argument": f"{layer.removesuffix(':')}{self.rule}",
            "input": f"{layer} forward input has",
            "pre-activation": f"{layer} forward pre-activation has",
            "output": f"{layer} forward output has",
            "prediction": f"prediction '{self.name}':",
            "added loss": f"loss that layer '{self.name}' adds:",
            "loss": f"loss {sources}{self.of_outputs}:" if self.source else "loss:",
            "gradient": f"{self._giver} has",
            "weight gradient": f"weight '{self.name}': backward gradient has",
            "learning rate": "learning rate:",
            "update": f"weight '{self.name}': update has",
        }[self.kind]


def named(prefix: str, structure: Any) -> list[tuple[str, Any]]:
    """The tensors of a nested structure with their names: `x`, `x[0]`, `x['ids']`."""
    if structure is None:
        return []
    if isinstance(structure, dict):
        return [
            pair for key, value in structure.items() for pair in named(f"{prefix}[{key!r}]", value)
        ]
    if isinstance(structure, (list, tuple)):
        return [
            pair for i, value in enumerate(structure) for pair in named(f"{prefix}[{i}]", value)
        ]
    return [(prefix, structure)]
