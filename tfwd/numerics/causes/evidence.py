"""Evidence about a step that is not finite, for the rules that find its causes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfwd import _keras
from tfwd._keras import wrapped_optimizers
from tfwd.numerics.leaf_optimizers import leaf_optimizers
from tfwd.numerics.tensor_measurements import Measurement, rows_text

STEP = "step"  # the name of the step's number in a history


class Evidence(NamedTuple):
    """Evidence about a step that is not finite.

    Attributes:
        found: the measurement of each tensor, in the order of computation.
        data: dict of the batch's arrays by name, `x`, `y[0]`.
        predictions: the measurements of the loss's inputs.
        history: the extents of each weight's gradient, by path, and of the loss, in the last steps.
            `STEP` is the step's number. Without it, the steps follow one another.
        model: the model.
        loss: str. The names of the model's losses.
        is_first: bool. True for the first step of this training; `None` if it is unknown whether
            the weights were finite after the last step.
        function: the loss of a single output, if the evidence is about one of several outputs.
        output: str. The name of that output.
        parts: for a non-finite loss of several outputs, the evidence of each output whose own loss
            is not finite.
    """

    found: Sequence[Measurement]
    data: Mapping[str, np.ndarray]
    predictions: Sequence[Measurement]
    history: Sequence[Mapping[str, float]]
    model: keras.Model
    loss: str
    is_first: bool | None
    function: Any = None
    output: str = ""
    parts: Sequence[Evidence] = ()

    def of(self, *kinds: str) -> list[Measurement]:
        """Returns the measurements of frames of some kinds."""
        return [one for one in self.found if one.frame.kind in kinds]

    def reaches(self, name: str) -> bool:
        """Returns False if the first non-finite tensor is not computed from a tensor of the batch.

        It returns True for gradients and updates, because their origins are not known.
        """
        first = self.first.frame
        return first.direction != "forward" or name in first.origins

    def may_take(self, found: Sequence[Measurement]) -> list[Measurement]:
        """Returns the tensors from which the first non-finite tensor can be computed.

        A tensor is left out if one of its origins does not reach the first non-finite tensor.
        """
        names = {name for one in found for name in one.frame.origins}
        others = {name for name in names if not self.reaches(name)}
        return [one for one in found if others.isdisjoint(one.frame.origins)]

    def bad(self, *kinds: str) -> list[Measurement]:
        """Returns the non-finite measurements of frames of some kinds."""
        return [one for one in self.of(*kinds) if not one.is_finite]

    def iterations(self) -> set[int]:
        """Returns the numbers of steps that the model's optimizers have made."""
        if not isinstance(self.model, keras.Model):
            return set()
        return {wrapped_optimizers.steps(leaf) for leaf in leaf_optimizers(self.model)}

    def was_trained(self) -> bool:
        """Returns True if an optimizer of the model has made a step before this step."""
        return any(count > 0 for count in self.iterations())

    def layer(self, path: str) -> Any:
        """Returns the layer of a frame's path; None if no layer or several layers have the path.

        The path has the names of the layers whose calls contain the layer's call. A layer may
        call a layer that is not its direct sublayer.
        """
        found: list[Any] = [self.model]
        for name in path.split("/"):
            direct = [x for one in found for x in _keras.layers.sublayers(one) if x.name == name]
            deeper = [x for one in found for x in _keras.layers.all_layers(one) if x.name == name]
            found = direct or deeper
        if not found:  # a layer that calls a layer of another layer
            last = path.rpartition("/")[2]
            found = [x for x in _keras.layers.all_layers(self.model) if x.name == last]
        return found[0] if len({id(one) for one in found}) == 1 else None

    @property
    def batch_size(self) -> int:
        """Returns the number of examples; 0 if it is unknown."""
        return next((len(values) for values in self.data.values() if values.ndim), 0)

    def rows_of(self, found: Measurement) -> np.ndarray:
        """Returns the examples with non-finite elements; no element if the rows are no examples."""
        rows = found.detail.rows
        return rows if self.batch_size in (0, len(rows)) else np.zeros(0, bool)

    def rows_text(self, found: Measurement) -> str:
        """Returns the rows with non-finite elements as text; "" if the tensor has no rows."""
        rows = found.detail.rows
        if not rows.any():
            return ""
        return rows_text(rows, "batch" if self.rows_of(found).size else "tensor")

    @property
    def first(self) -> Measurement:
        """Returns the first non-finite measurement."""
        return next(one for one in self.found if not one.is_finite)

    @property
    def outputs_before(self) -> list[Measurement]:
        """Returns the outputs of layers that are computed before the first non-finite tensor."""
        return [x for x in self.found[: self.found.index(self.first)] if x.frame.kind == "output"]

    @property
    def tensors_before(self) -> list[Measurement]:
        """Returns the tensors from which the first non-finite tensor is computed, the nearest last.

        These are the tensor just before it, the outputs of the layers that its layer takes, and the
        outputs of layers inside its layer.
        """
        first = self.first
        at = self.found.index(first)
        givers = {
            one.frame.name for one in self.of("gradient") if first.frame.name in one.frame.source
        }
        outputs = [one for one in self.found[:at] if one.frame.kind in ("input", "output")]
        inside = [one for one in outputs if one.frame.name.startswith(f"{first.frame.name}/")]
        given = [one for one in outputs if one.frame.name in givers]
        return [*([] if self.before is None else [self.before]), *given, *inside]

    @property
    def before(self) -> Measurement | None:
        """Returns the tensor just before the first non-finite one, but none inside its layer."""
        first = self.first
        at = self.found.index(first)
        kinds = ("data", "input", "pre-activation", "output")
        given = [
            one
            for one in reversed(self.found[:at])
            if one.frame.kind in kinds and not one.frame.name.startswith(f"{first.frame.name}/")
            if one.frame.kind != "data" or one.frame.name[:1] == "x"
        ]
        if first.frame.kind == "input":  # code computes it from outputs that no layer takes
            gradients = self.of("gradient")
            taken = {(x.frame.name, x.frame.call) for x in gradients if x.frame.source}
            free = [
                one
                for one in given
                if one.frame.kind == "output" and (one.frame.name, one.frame.call) not in taken
            ]
            given = free or given
        given = self.may_take(given) or given
        return next(iter(given), None)
