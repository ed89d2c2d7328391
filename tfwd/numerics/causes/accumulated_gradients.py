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
    largest = {one.frame.name: one.detail.summary.abs_max for one in evidence.of("weight gradient")}
    for leaf in leaf_optimizers(evidence.model):
        pairs = [
            (_keras.variables.path(weight), total)
            for weight, total in wrapped_optimizers.accumulated_gradients(leaf)
            if _keras.variables.path(weight) in largest
        ]
        sums = {name: _abs_max(total) for name, total in pairs}
        stored = [name for name, x in pairs if _keras.variables.path(x) == first.frame.name]
        # In the step of the update, the optimizer does not store the sums: the weights are bad.
        limit = float(tf.as_dtype(first.frame.dtype).max)
        may = [name for name in sums if largest[name] + sums[name] > limit]
        name = max(stored or may, key=lambda name: largest[name] + sums[name], default="")
        if name:
            exceeds = "exceeds" if stored else "may exceed"
            return (
                f"The optimizer has gradient_accumulation_steps="
                f"{leaf.gradient_accumulation_steps}: Keras adds the gradients of "
                f"{leaf.gradient_accumulation_steps} steps before it divides the sum. The gradient "
                f"of '{name}' reaches {largest[name]:.3g} in this step, and the sum of the earlier "
                f"steps reaches {sums[name]:.3g}. The new sum {exceeds} {limit:.3g}, the largest "
                f"{first.frame.dtype}."
            )
    return ""


class MeanGradient(NamedTuple):
    """Gradient of a weight that an optimizer computes of several steps.

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
    largest = {one.frame.name: one.detail.summary.abs_max for one in evidence.of("weight gradient")}
    found: dict[str, MeanGradient] = {}
    for leaf in leaf_optimizers(evidence.model):
        for weight, total in wrapped_optimizers.accumulated_gradients(leaf):
            name, steps = _keras.variables.path(weight), leaf.gradient_accumulation_steps
            if name in largest:
                earlier = _abs_max(total)
                size = (earlier + largest[name]) / steps
                found[name] = MeanGradient(
                    size,
                    f"The optimizer has gradient_accumulation_steps={steps}. The gradient of "
                    f"'{name}' reaches {largest[name]:.3g} in this step, and the sum of the "
                    f"earlier steps reaches {earlier:.3g}, so their mean reaches {size:.3g}.",
                )
    return found


def _abs_max(variable: Any) -> float:
    return summarize(tf.convert_to_tensor(_keras.variables.value(variable))).numbers().abs_max


def _was_updated(evidence: Evidence) -> bool:
    """Returns True if an optimizer has changed the weights before. It counts all steps."""
    return any(
        wrapped_optimizers.steps(leaf) >= leaf.gradient_accumulation_steps
        for leaf in leaf_optimizers(evidence.model)
        if wrapped_optimizers.accumulates(leaf)
    )
