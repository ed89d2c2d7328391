"""Rule for gradients of several steps whose sum overflows, with `gradient_accumulation_steps`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import wrapped_optimizers
from tfwd.finite import summarize
from tfwd.numerics.bad_step_report import Cause
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.large_inputs import large_inputs
from tfwd.numerics.leaf_optimizers import leaf_optimizers


def accumulated_gradients(evidence: Evidence) -> Iterator[Cause]:
    """Checks for an update that is not finite because the sum of several gradients overflows."""
    found = overflowing_sum(evidence)
    if not found:
        return
    dtype = evidence.first.frame.dtype
    wider = f"; use float32 weights instead of {dtype}" * (dtype == "float16")
    later = "; if earlier updates made weights large, lower the learning rate"
    yield Cause(
        "a sum of gradients that overflows",
        f"The gradients of this step are finite, but the new value of "
        f"'{evidence.first.frame.name}' is not. {found}{large_inputs(evidence, '')}",
        "make the loss smaller, or scale the data and the labels; use fewer "
        f"gradient_accumulation_steps{wider}{later * _was_updated(evidence)}. Clipping in the "
        "optimizer does not prevent the overflow, because Keras clips after it has added the "
        "gradients.",
    )


def overflowing_sum(evidence: Evidence) -> str:
    """Returns which sum of accumulated gradients overflows, as text; "" for other causes.

    The update must be the first non-finite tensor. The model must have its state from before the
    step, with the sums of the earlier gradients.
    """
    first = evidence.first
    if first.frame.kind != "update" or not isinstance(evidence.model, keras.Model):
        return ""
    limit = float(tf.as_dtype(first.frame.dtype).max)
    for leaf in leaf_optimizers(evidence.model):
        sums = _sums(evidence, leaf)
        stored = [one for one in sums if one.path == first.frame.name]
        # In the step of the update, the optimizer does not store the sums: the weights are bad.
        may = [one for one in sums if one.now + one.earlier > limit]
        found = max(stored or may, key=lambda one: one.now + one.earlier, default=None)
        if found:
            exceeds = "exceeds" if stored else "may exceed"
            return (
                f"The optimizer has gradient_accumulation_steps={found.steps}: Keras adds the "
                f"gradients of {found.steps} steps before it divides the sum. {found.text}. The "
                f"new sum {exceeds} {limit:.3g}, the largest {first.frame.dtype}."
            )
    return ""


class _Sum(NamedTuple):
    """Sum of the gradients of a weight in earlier steps.

    Attributes:
        weight: str. Path of the weight.
        path: str. Path of the optimizer's variable.
        now: float. Largest absolute value of the gradient in this step.
        earlier: float. Largest absolute value of the sum of the earlier steps.
        steps: int. Number of steps for each update.
    """

    weight: str
    path: str
    now: float
    earlier: float
    steps: int

    @property
    def text(self) -> str:
        """Returns a sentence about both numbers, without its period."""
        return (
            f"The gradient of '{self.weight}' reaches {self.now:.3g} in this step, and the sum of "
            f"the earlier steps reaches {self.earlier:.3g}"
        )


def _sums(evidence: Evidence, leaf: Any) -> list[_Sum]:
    """Returns the sums of an optimizer for the weights with a gradient in this step."""
    largest = {one.frame.name: one.detail.summary.abs_max for one in evidence.of("weight gradient")}
    return [
        _Sum(
            name,
            _keras.variables.path(total),
            largest[name],
            summarize(tf.convert_to_tensor(_keras.variables.value(total))).numbers().abs_max,
            leaf.gradient_accumulation_steps,
        )
        for weight, total in wrapped_optimizers.accumulated_gradients(leaf)
        if (name := _keras.variables.path(weight)) in largest
    ]


class MeanGradient(NamedTuple):
    """Mean gradient of a weight over several steps.

    Attributes:
        size: float. Largest absolute value of the mean, with the gradient of this step.
        text: str. Sentences about it.
    """

    size: float
    text: str


def mean_gradients(evidence: Evidence) -> dict[str, MeanGradient]:
    """Returns the mean gradients of optimizers that accumulate, by the name of the weight.

    The model must have its state from before the step, which must be a step that updates weights.
    """
    found: dict[str, MeanGradient] = {}
    for leaf in leaf_optimizers(evidence.model):
        for one in _sums(evidence, leaf):
            size = (one.now + one.earlier) / one.steps
            found[one.weight] = MeanGradient(
                size,
                f"The optimizer has gradient_accumulation_steps={one.steps}. {one.text}, so their "
                f"mean reaches {size:.3g}.",
            )
    return found


def _was_updated(evidence: Evidence) -> bool:
    """Returns True if an optimizer has changed the weights before. It counts all steps."""
    return any(
        wrapped_optimizers.steps(leaf) >= leaf.gradient_accumulation_steps
        for leaf in leaf_optimizers(evidence.model)
        if wrapped_optimizers.accumulates(leaf)
    )
