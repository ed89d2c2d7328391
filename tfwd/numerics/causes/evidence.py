"""What is known of a step that is not finite, which its causes are told by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfwd.numerics.report import Found


class Evidence(NamedTuple):
    """What is known of a step.

    Attributes:
        found: what was found in each tensor, in the order of computation.
        data: the batch by name, `x`, `y[0]`, in arrays.
        predictions: what was found in what the loss was given.
        history: the extent of each weight's gradient by path, and of the loss, in the last steps.
        model: the model.
        loss: the names of the model's losses.
        is_first: whether no step of this training was made before; `None` if it is not known that
            the weights were finite after the last one.
        function: the loss of the output that this is about, if it is about one of several.
        output: the name of that output.
        parts: of a loss of several outputs that is not finite, what is known of each of these whose
            own loss is not.
    """

    found: Sequence[Found]
    data: Mapping[str, np.ndarray]
    predictions: Sequence[Found]
    history: Sequence[Mapping[str, float]]
    model: keras.Model
    loss: str
    is_first: bool | None
    function: Any = None
    output: str = ""
    parts: Sequence[Evidence] = ()

    def of(self, *kinds: str) -> list[Found]:
        """What was found in frames of some kinds."""
        return [one for one in self.found if one.frame.kind in kinds]

    def bad(self, *kinds: str) -> list[Found]:
        """Those of them that are not finite."""
        return [one for one in self.of(*kinds) if not one.is_finite]

    @property
    def batch_size(self) -> int:
        """How many examples there are; 0 if it is not known."""
        return next((len(values) for values in self.data.values() if values.ndim), 0)

    @property
    def first(self) -> Found:
        """The first that is not finite."""
        return next(one for one in self.found if not one.is_finite)

    @property
    def leading(self) -> list[Found]:
        """What leads to the first that is not finite, the nearest last.

        The outputs of layers inside of it, of those whose output it takes, and what was before it.
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
    def before(self) -> Found | None:
        """The layer's tensor just before the first that is not finite, and none inside of it."""
        first = self.first
        at = self.found.index(first)
        kinds = ("data", "input", "pre-activation", "output")
        given = (
            one
            for one in reversed(self.found[:at])
            if one.frame.kind in kinds and not one.frame.name.startswith(f"{first.frame.name}/")
        )
        return next(
            (one for one in given if one.frame.kind != "data" or one.frame.name[:1] == "x"), None
        )
