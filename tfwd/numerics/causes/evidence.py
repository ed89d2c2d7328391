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
        loss_weight: float. The number of that output in the `loss_weights` of `compile`.
        parts: for a non-finite loss of several outputs, the evidence of each output whose own loss
            is not finite, with or without its weights.
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
    loss_weight: float = 1.0
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
    def calls(self) -> int:
        """Returns the number of calls of the layer of the first non-finite tensor."""
        return self._calls_of(self.first.frame.name)

    def _calls_of(self, name: str) -> int:
        return max(one.frame.call for one in self.found if one.frame.name == name)

    @property
    def inputs_of_calls(self) -> list[Measurement]:
        """Returns the checked inputs of the layer of the first non-finite tensor, the nearest last.

        If the layer has several calls, an input may be the input of another call. Inputs are left
        out if they are computed after the tensor, or from data that do not reach the tensor.
        """
        givers = self._givers()
        outputs = [
            one
            for one in self.found[: self.found.index(self.first)]
            if one.frame.kind in ("input", "output")
            if (one.frame.name, one.frame.call) in givers
        ]
        return self.may_take(outputs)

    def _givers(self) -> set[tuple[str, int]]:
        """Returns the calls of layers whose outputs the layer of the first tensor takes."""
        name = self.first.frame.name
        found = [one.frame for one in self.of("gradient")]
        return {(frame.name, frame.call) for frame in found if name in frame.source}

    @property
    def inputs_of_call(self) -> list[Measurement]:
        """Returns the inputs of the call that returned the first non-finite tensor, if known.

        If the layer has only one call, these are the inputs of the layer. Otherwise, they are the
        inputs that no layer returned, and some inputs that are computed after the previous call:
        all of them for the last call; for other calls, the outputs of layers that have as many
        calls. An input is also known if it is the only possible one, and the other calls have
        others. The nearest input is the last.
        """
        given, first = self.inputs_of_calls, self.first.frame
        if self.calls == 1:
            return given
        before = self.found[: self.found.index(self.first)]
        own = [
            one
            for one in before
            if one.frame.kind == "input"
            if (one.frame.name, one.frame.call) == (first.name, first.call)
        ]
        ends = [
            i
            for i, one in enumerate(before)
            if one.frame.kind == "output"
            if (one.frame.name, one.frame.call) == (first.name, first.call - 1)
        ]
        if first.call > 1 and not ends:
            return own
        later = {id(one) for one in before[max(ends, default=-1) + 1 :]}
        is_last = first.call == self.calls
        since = [
            one
            for one in given
            if id(one) in later and (is_last or self._calls_of(one.frame.name) == self.calls)
        ]
        is_only = len(given) == 1 and len(self._givers()) >= self.calls
        return own + since or given * is_only

    @property
    def tensors_before(self) -> list[Measurement]:
        """Returns the tensors from which the first non-finite tensor is computed, the nearest last.

        These are the tensor just before it, the outputs of the layers that its layer takes, and the
        outputs of layers inside its layer. If the layer has several calls and the inputs of this
        call are not known, the inputs of all calls are among them.
        """
        first = self.first
        outputs = [
            one
            for one in self.found[: self.found.index(first)]
            if one.frame.kind in ("input", "output")
        ]
        inside = [one for one in outputs if one.frame.name.startswith(f"{first.frame.name}/")]
        given = self.inputs_of_call or self.inputs_of_calls
        return [*([] if self.before is None else [self.before]), *given, *inside]

    @property
    def before(self) -> Measurement | None:
        """Returns the tensor just before the first non-finite one, but none inside its layer."""
        first = self.first
        if first.frame.kind in ("pre-activation", "output") and self.calls > 1:
            known = self.inputs_of_call or self.inputs_of_calls
            if known:
                return known[-1]
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
