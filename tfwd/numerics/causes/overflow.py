"""Rules for overflows: float16, exploding gradients, an exploding forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfwd.finite import SQUARED_IS_FINITE
from tfwd.numerics.bad_step_report import Cause
from tfwd.numerics.causes.accumulated_gradients import overflowing_sum
from tfwd.numerics.causes.evidence import STEP, Evidence
from tfwd.numerics.causes.gradient_clipping import or_clip
from tfwd.numerics.causes.large_inputs import large_inputs
from tfwd.numerics.causes.squared_gradients import overflowing_squares
from tfwd.numerics.causes.weight_decay import SMALLER, growing_decay
from tfwd.numerics.non_finite_variables import is_state
from tfwd.numerics.tensor_measurements import Measurement, rows_text

HALF_MAX = 65504.0
SQUARED_IS_INFINITE = math.sqrt(tf.float32.max)
LARGE = 1e3  # larger than weights in a successful training


class _Growth(NamedTuple):
    """Growth of a gradient over some checked steps.

    Attributes:
        size: Extent in the last of these steps.
        factor: Growth over all of these steps.
        checks: Number of checked steps after the first of them.
        steps: Number of steps after the first of them. Unchecked steps count too.
    """

    size: float
    factor: float
    checks: int
    steps: float

    @property
    def per_check(self) -> float:
        """Mean growth from one checked step to the next checked step."""
        return self.factor ** (1 / self.checks)

    @property
    def per_step(self) -> float:
        """Mean growth from one step to the next step."""
        return self.factor ** (1 / self.steps)


def exp_limit(found: Measurement) -> float:
    """Returns the logarithm of the dtype's largest number: 88.7 for float32."""
    dtype = tf.as_dtype(found.frame.dtype)
    return math.log(float(dtype.max)) if dtype.is_floating else math.log(float(tf.float32.max))


def is_beyond_exp(found: Measurement) -> bool:
    """Returns True if the exponential of an element is infinite."""
    return found.detail.high > exp_limit(found)


def half_precision(evidence: Evidence) -> Iterator[Cause]:
    """Checks for numbers beyond 65504, the largest float16."""
    first = evidence.first
    at = evidence.found.index(first)
    near = [
        one
        for one in evidence.found[max(0, at - 4) : at + 1]
        if one.frame.dtype == "float16" and one.detail.summary.abs_max > HALF_MAX / 16
    ]
    if first.frame.dtype != "float16" or overflow_in_optimizer(evidence):
        return
    data = [
        one
        for one in evidence.of("data")
        if one.frame.name.startswith("x") and one.detail.summary.abs_max > HALF_MAX
        if evidence.reaches(one.frame.name)
    ]
    if data and first.frame.kind == "input":  # before any computation
        reached = ", ".join(
            f"'{one.frame.name}' reaches {one.detail.summary.abs_max:.4g}" for one in data
        )
        yield Cause(
            "an overflow of float16",
            f"{reached}. The largest float16 is 65504, so the data overflow when "
            f"'{first.frame.name}' casts them to float16.",
            "scale the data (mean 0, deviation 1) before the model; or give the first layer "
            "dtype='float32'; or use mixed_bfloat16, which has the range of float32.",
        )
        return
    largest = max(near, key=lambda one: one.detail.summary.abs_max, default=None)
    seen = (
        f"'{largest.frame.label}' reaches {largest.detail.summary.abs_max:.4g}, near the largest "
        "float16, 65504."
        if largest is not None
        else f"'{first.frame.label}' is float16, whose largest number is 65504."
    )
    if evidence.before is not None and first.frame.kind == "output":
        given, made = evidence.before.detail.summary.abs_max, first.detail.summary.abs_max
        if largest is None and max(given, made) < HALF_MAX / 16:
            if not _may_overflow_half(evidence):
                return
            seen += (
                f" Its inputs are at most {given:.3g}, and its finite outputs at most {made:.3g}. "
                "A number inside the layer is larger, for example a large sum, a square, or a "
                "constant such as a mask of -1e9. Or the layer divides by 0."
            )
    if largest is None and not (
        first.detail.summary.positive_inf + first.detail.summary.negative_inf
    ):
        return
    backward = first.frame.direction == "backward"
    yield Cause(
        "an overflow of float16",
        seen,
        "make the loss smaller (scale the labels, use a mean instead of a sum), and use a "
        "LossScaleOptimizer, which lowers its scale until gradients fit (fit uses it with "
        "mixed_float16; a custom training step must call optimizer.scale_loss); or use "
        "mixed_bfloat16, which has the range of float32."
        if backward
        else "divide before a sum or a product, not after it (attention divides by the root "
        "of the width); use a mask of -3e4; run this layer in float32 (dtype='float32'); or use "
        "mixed_bfloat16, which has the range of float32.",
    )


def _may_overflow_half(evidence: Evidence) -> bool:
    """Returns False if infinity probably comes from zeros, as in 1/0 or a logarithm of 0.

    The input then has enough zeros, and products and sums of its elements cannot overflow.
    """
    given = [one for one in evidence.tensors_before if one.frame.dtype != "int32"]
    found = evidence.first.detail.summary
    infinite = found.positive_inf + found.negative_inf
    if not any(one.detail.summary.zeros >= infinite for one in given):
        return True
    layer = evidence.first.frame.name.rpartition("/")[2]
    weights = [one for one in evidence.of("weight") if f"/{layer}/" in f"/{one.frame.name}"]
    largest = max([one.detail.summary.abs_max for one in given], default=math.inf)
    factor = max([largest, 1.0, *(one.detail.summary.abs_max for one in weights)])
    rows = max(len(evidence.first.detail.rows), 1)
    terms = max([one.detail.summary.size / rows for one in given], default=1.0)
    return largest * factor * terms > HALF_MAX or any(map(is_beyond_exp, given))


def overflow_in_optimizer(evidence: Evidence) -> str:
    """Returns which sum or which squares of gradients overflow in the update, as text, or ""."""
    return overflowing_sum(evidence) or overflowing_squares(evidence)


def overflows_half(evidence: Evidence) -> bool:
    """Returns True if the first non-finite tensor overflows float16."""
    summary = evidence.first.detail.summary
    infinite = summary.positive_inf + summary.negative_inf
    return (
        evidence.first.frame.dtype == "float16" and infinite > 0 and summary.abs_max > HALF_MAX / 16
    )


def _too_large_data(evidence: Evidence) -> Iterator[Cause]:
    """Yields a cause for each input with infinite squares that makes later tensors large."""
    first, before = evidence.first, evidence.before
    computed = [
        one
        for one in evidence.found[: evidence.found.index(first)]
        if one.frame.kind in ("input", "pre-activation", "output")
    ]
    takes_data = before is not None and before.frame.kind == "data"
    is_large = any(_reaches(one, SQUARED_IS_INFINITE) for one in computed)
    if first.frame.dtype == "float16" or not (is_large or takes_data):
        return
    for one in evidence.of("data"):
        name, values = one.frame.name, evidence.data.get(one.frame.name)
        is_float = name[:1] == "x" and "float" in one.frame.dtype
        if not is_float or not _reaches(one, SQUARED_IS_INFINITE) or not evidence.reaches(name):
            continue
        where, bad = "", evidence.rows_of(first)
        if values is not None and values.ndim and values.size:
            large = np.abs(values).reshape(len(values), -1).max(1) > SQUARED_IS_INFINITE
            is_known = first.frame.direction == "forward" and len(bad) == len(large) and bad.any()
            if is_known and not (bad & large).any():
                continue
            where = "" if large.all() else f" in {rows_text(large)}"
        yield Cause(
            "data that are too large",
            f"'{name}' reaches {one.detail.summary.abs_max:.3g}{where}, and its square is "
            "infinite.",
            "correct or remove these examples, and scale the data (mean 0, deviation 1).",
        )


def exploding_gradients(evidence: Evidence) -> Iterator[Cause]:
    """Checks for very large numbers, in the data or not, and for gradients that grew."""
    of_data = list(_too_large_data(evidence))
    if of_data:
        yield from of_data
        return
    growth: dict[str, _Growth] = {}
    history = list(evidence.history)
    steps = [past.get(STEP, i) for i, past in enumerate(history)]
    for name in history[-1] if history else ():
        sizes = [(step, past.get(name, 0.0)) for step, past in zip(steps, history, strict=True)]
        sizes = [one for one in sizes if one[1] > 0 and np.isfinite(one[1])][-6:]
        if name != STEP and len(sizes) >= 3:
            (begin, smaller), (end, larger) = sizes[0], sizes[-1]
            growth[name] = _Growth(larger, larger / smaller, len(sizes) - 1, max(end - begin, 1))
    for name in ("loss", *(one.frame.name for one in evidence.of("loss"))):
        growth.pop(name, None)
    in_optimizer = overflow_in_optimizer(evidence)
    decay = growing_decay(evidence) * evidence.was_trained()
    clip = "" if in_optimizer or decay else or_clip(evidence)
    less_decay = f"{SMALLER}; otherwise " if decay else ""
    grown = {name: x for name, x in growth.items() if x.per_check > 1.5 and x.factor > 10}
    if grown and 2 * len(grown) >= len(growth):
        leader = max(grown, key=lambda name: grown[name].per_check)
        fastest = grown[leader]
        yield Cause(
            "exploding gradients",
            f"In the last steps, {len(grown)} of {len(growth)} gradients grew. The gradient of "
            f"'{leader}' grew fastest, by a factor of {fastest.per_step:.3g} per step, to "
            f"{fastest.size:.3g}.{decay}",
            f"{less_decay}lower the learning rate, or warm it up{clip}.",
        )
        return
    if in_optimizer:  # another rule explains the overflow
        return
    at = evidence.found.index(evidence.first)
    counts = evidence.iterations()
    no_update = not evidence.was_trained() if counts else bool(evidence.is_first)
    enormous = [
        one
        for one in evidence.found[:at]
        if one.frame.dtype != "float16"
        and one.frame.kind not in ("data", "loss scale", "learning rate")
        and _reaches(one, LARGE if one.frame.kind == "weight" else SQUARED_IS_FINITE)
        and (no_update or not is_state(evidence.model, one.frame))
    ]
    if enormous:
        largest = max(enormous, key=lambda one: one.detail.summary.abs_max)
        scale = large_inputs(evidence, "")
        forward = evidence.first.frame.direction == "forward"
        grown_weights = any(one.frame.kind == "weight" for one in enormous)
        if forward and (no_update or not (grown_weights or evidence.history)):
            when = "The sizes of earlier gradients are not known."
            if no_update:
                first = "This is the first step of the training"
                reason = first if evidence.is_first else "No step has changed the weights yet"
                when = f"{reason}: neither gradients nor the learning rate are the cause."
            yield _overflow_without_updates(largest, scale, when)
            return
        first_steps = (
            ""
            if grown_weights and not no_update
            else "; in one of the first steps, check the initial weights and the scale of the data"
        )
        yield Cause(
            "exploding gradients",
            f"'{largest.frame.label}' reaches {largest.detail.summary.abs_max:.3g} in this step, "
            f"before anything is infinite.{scale}{decay}",
            f"{less_decay}{'scale the data, labels too; ' if scale else ''}lower the learning rate"
            f"{clip}{first_steps}.",
        )


def _overflow_without_updates(largest: Measurement, scale: str, when: str) -> Cause:
    """Returns the cause for an overflow in forward, if no update has caused it."""
    return Cause(
        "an overflow in the forward pass",
        f"'{largest.frame.label}' reaches {largest.detail.summary.abs_max:.3g}, before anything is "
        f"infinite.{scale} {when}",
        f"{'scale the data (mean 0, deviation 1); ' if scale else ''}make initial weights smaller, "
        "as the initializers glorot_uniform and he_normal do, or normalize between layers "
        "(LayerNormalization, BatchNormalization).",
    )


def _reaches(found: Measurement, limit: float) -> bool:
    return found.detail.summary.abs_max > limit
