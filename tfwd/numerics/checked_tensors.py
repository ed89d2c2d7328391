"""Checked tensors of a training step, and their names in a report."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

# In the order of computation. A report uses this order too.
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
    "loss scale",
    "learning rate",
    "update",
)
FORWARD = (
    *("data", "weight", "argument", "input", "pre-activation", "output", "prediction"),
    *("added loss", "loss"),
)
BACKWARD = ("gradient", "weight gradient")


class Frame(NamedTuple):
    """Checked tensor of a step.

    Attributes:
        kind: one of `KINDS`.
        name: str. The path of a layer, as `encoder/dense_2`, or of a weight. `x`, `y[0]` for data.
            For one of several losses: `loss[1]` or `loss['head']` as given to one
            `tape.gradient`, `loss 2` in the second `tape.gradient`.
        layer: str. The class of the layer, or an empty string.
        dtype: str. The tensor's dtype.
        source: for a gradient of a layer's output, the layers that it comes from; for a loss, the
            names of the loss functions.
        outputs: for a loss, the names of its outputs, if the model has several and they are known.
        call: int. The number of the call, from 1, of a layer that is called several times in a
            step.
        recurrent: bool. The layer is recurrent.
        has_time: bool. The second axis of the measured tensor is the time of a recurrent layer.
        rule: str. For an argument that a layer checks: the layer's rule. The tensor is NaN where
            the argument breaks the rule.
        origins: the names of the batch's tensors from which the tensor is computed. Known only in
            a diagnosis, and only of tensors in forward.
    """

    kind: str
    name: str
    layer: str = ""
    dtype: str = "float32"
    source: tuple[str, ...] = ()
    call: int = 1
    outputs: tuple[str, ...] = ()
    rule: str = ""
    recurrent: bool = False
    has_time: bool = False
    origins: tuple[str, ...] = ()

    @property
    def direction(self) -> str:
        """Returns "forward", "backward" or "update"."""
        if self.kind in FORWARD:
            return "forward"
        return "backward" if self.kind in BACKWARD else "update"

    @property
    def label(self) -> str:
        """Returns the name in a table or a plot."""
        return self.kind if self.name == self.kind else f"{self.path}, {self.kind}"

    @property
    def path(self) -> str:
        """Returns the name, with the number of the call if it is not the first call."""
        return f"{self.name}{self._which}"

    @property
    def of_outputs(self) -> str:
        """Returns the outputs of a loss as text: " of output 'head'"."""
        if not self.outputs:
            return ""
        names = " and ".join(map(repr, self.outputs))
        return f" of output{'s' * (len(self.outputs) > 1)} {names}"

    @property
    def _which(self) -> str:
        return f" (call {self.call})" if self.call > 1 else ""

    @property
    def _gradient_origin(self) -> str:
        """Returns the source of a gradient, and the layer that receives it, as text."""
        to = f"'{self.name}'{self._which}"
        if not self.source:
            return f"the loss, or code after layer {to}: backward gradient"
        sources = f"layer{'s' * (len(self.source) > 1)} {' and '.join(map(repr, self.source))}"
        return f"{sources}: backward gradient for the output of {to}"

    @property
    def _loss(self) -> str:
        if self.name != "loss":  # one of several losses, or a loss in the logs of a custom step
            return self.name if self.name.startswith("loss") else f"loss '{self.name}'"
        sources = " and ".join(map(repr, self.source))
        return f"loss {sources}{self.of_outputs}" if self.source else "loss"

    @property
    def subject(self) -> str:
        """Returns the beginning of a sentence about the tensor's elements."""
        layer = f"layer '{self.name}'{self._which}:"
        return {
            "data": f"data '{self.name}':",
            "weight": f"weight '{self.name}':",
            "argument": f"{layer.removesuffix(':')}{self.rule}",
            "input": f"{layer} forward input has",
            "pre-activation": f"{layer} forward pre-activation has",
            "output": f"{layer} forward output has",
            "prediction": f"prediction '{self.name}':",
            "added loss": f"loss that layer '{self.name}' adds:",
            "loss": f"{self._loss}:",
            "gradient": f"{self._gradient_origin} has",
            "weight gradient": f"weight '{self.name}': backward gradient has",
            "loss scale": "loss scale:",
            "learning rate": "learning rate:",
            "update": f"weight '{self.name}': update has",
        }[self.kind]


def named(prefix: str, structure: Any) -> list[tuple[str, Any]]:
    """Returns the tensors of a nested structure with their names: `x`, `x[0]`, `x['ids']`."""
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


def stored_values(tensor: Any) -> Any:
    """Returns the stored values of a ragged or sparse tensor, and any other tensor unchanged."""
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.flat_values
    return tensor.values if isinstance(tensor, tf.SparseTensor) else tensor
