"""Finds finite gradients whose squares overflow in an update."""

from __future__ import annotations

import math
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfwd.numerics.bad_step_report import Cause
from tfwd.numerics.causes.accumulated_gradients import mean_gradients, overflowing_sum
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.gradient_clipping import clipping
from tfwd.numerics.causes.large_inputs import large_inputs
from tfwd.numerics.leaf_optimizers import leaf_optimizers


def squared_gradients(evidence: Evidence) -> Iterator[Cause]:
    """Checks for an update that is not finite because squares of gradients overflow."""
    found = overflowing_squares(evidence)
    if not found:
        return
    dtype = evidence.first.frame.dtype
    root = math.sqrt(float(tf.as_dtype(dtype).max))
    instead = " in place of global_clipnorm" * ("global_clipnorm" in clipping(evidence))
    wider = f", or use float32 weights instead of {dtype}" * (dtype == "float16")
    later = ". If earlier steps made weights large, lower the learning rate"
    yield Cause(
        "a gradient whose square overflows",
        f"The gradients and the learning rate are finite, but the new value of "
        f"'{evidence.first.frame.name}' is not. {found}{large_inputs(evidence, '')}",
        "scale the data, the labels or the loss, so that all gradients are far below "
        f"{root:.3g}{wider}. Or clip each element of the gradients, with clipvalue=1.0 of any "
        f"Keras optimizer{instead}{later * evidence.was_trained()}.",
    )


def overflowing_squares(evidence: Evidence) -> str:
    """Returns which squares overflow in the first non-finite update, as text; "" for other causes.

    Clipping by the norm of one gradient or by value avoids such squares. The product of learning
    rate and gradient is another cause, and so is the sum of accumulated gradients.
    """
    first = evidence.first
    gradients = evidence.of("weight gradient")
    clips = clipping(evidence)
    is_global = "global_clipnorm" in clips
    if first.frame.kind != "update" or not gradients or not (is_global or "" in clips):
        return ""
    if overflowing_sum(evidence):
        return ""
    limit = float(tf.as_dtype(first.frame.dtype).max)
    means = mean_gradients(evidence) if isinstance(evidence.model, keras.Model) else {}
    sizes = {one.frame.name: one.detail.summary.abs_max for one in gradients}
    sizes |= {name: mean.size for name, mean in means.items()}
    name = max(sizes, key=lambda name: sizes[name])
    size = sizes[name]
    rates = [one.detail.high for one in evidence.of("learning rate")]
    if not is_global and any(rate * size > limit for rate in rates):
        return ""
    text = f"The largest gradient is {size:.3g}, of '{name}'."
    if name in means:
        text = means[name].text
    number = f"{limit:.3g}, the largest {first.frame.dtype}"
    use = "The optimizer adds the squares of all gradients for global_clipnorm."
    if not is_global:
        use = "Adam, RMSprop and similar optimizers store means or sums of such squares."
    if size * size > limit:
        is_stored = first.detail.summary.positive_inf > 0 or _divides_by_squares(evidence)
        return f"{text} Its square exceeds {number}. {use}" if is_global or is_stored else ""
    # The norm is not measured: this is the largest sum that the gradients can have.
    bound = sum(one.detail.summary.size * sizes[one.frame.name] ** 2 for one in gradients)
    if is_global and bound > limit:
        return f"{text} {use} Their sum may exceed {number}."
    return ""


def _divides_by_squares(evidence: Evidence) -> bool:
    """Returns True for optimizers whose weights become NaN in the step in which a square overflows.

    Adam and others store the infinite square, so the stored variable is the first bad one.
    """
    leaves = leaf_optimizers(evidence.model)
    return any(
        type(leaf).__name__ in ("Ftrl", "Adafactor") or getattr(leaf, "centered", False)
        for leaf in leaves
    )
