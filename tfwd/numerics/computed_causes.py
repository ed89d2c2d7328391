"""Causes that lie in what a model computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tfwd import _keras
from tfwd.finite import SQUARED_IS_FINITE
from tfwd.numerics.details import rows_of
from tfwd.numerics.evidence import Evidence
from tfwd.numerics.report import Cause, Found, is_recurrent

HALF_MAX = 65504.0
UNSCALED = 100.0  # data that layers are given are about 1
LARGE = 1e3  # beyond what weights are in a training that goes well
NORMALIZING = (
    "BatchNormalization",
    "LayerNormalization",
    "GroupNormalization",
    "UnitNormalization",
)


def normalization(evidence: Evidence) -> Iterator[Cause]:
    """A layer that divides by the root of a variance."""
    first, before = evidence.first, evidence.before
    kind = first.frame.layer
    if kind not in NORMALIZING or first.frame.kind not in ("output", "gradient"):
        return
    name = first.frame.name.rpartition("/")[2]
    layer = next((x for x in _keras.layers.all_layers(evidence.model) if x.name == name), None)
    epsilon = getattr(layer, "epsilon", None)
    given = ""
    if before is not None and before.detail.low == before.detail.high:
        given = f" Its input is {before.detail.low:g} everywhere."
    yield Cause(
        "a variance near zero",
        f"The first that is not finite comes out of a {kind}, which divides by the root of a "
        f"variance plus epsilon = {epsilon}.{given}",
        "use a larger epsilon (1e-3; in float16 nothing below 1e-4), a larger batch, and look for "
        "units before it that are the same for all examples.",
    )


def over_time(evidence: Evidence) -> Iterator[Cause]:
    """A recurrent layer whose state is finite at first, and then is not."""
    first = evidence.first
    steps = first.detail.steps
    if first.frame.kind != "output" or not is_recurrent(first.frame) or not steps.any():
        return
    step = int(steps.argmax())
    if step:
        yield Cause(
            "a state that grows from step to step",
            f"What '{first.frame.name}' is given is finite, its state too up to time step "
            f"{step - 1}, and at step {step} it is not.",
            "use a bounded activation (tanh) or gates (LSTM, GRU), begin with a recurrent kernel "
            "that is orthogonal, or normalize inside the cell; shorter sequences only hide it.",
        )


def domain(evidence: Evidence) -> Iterator[Cause]:
    """Finite numbers are made into what is not: a function outside its domain."""
    first, before = evidence.first, evidence.before
    what = f"'{first.frame.name}' makes"
    if first.frame.kind == "input" and before is not None:
        what = f"What is computed between '{before.frame.label}' and '{first.frame.label}' makes"
    if first.frame.kind == "loss":
        bad = [one for one in evidence.predictions if not one.is_finite]
        first = next(iter(bad), first)
        what = "What the model computes after its last layer makes"
    if first.frame.kind not in ("input", "output", "pre-activation", "prediction"):
        return
    if before is None:
        return
    found, given = first.detail.summary, before.detail
    infinite = found.positive_inf + found.negative_inf
    kinds = [word for word, count in (("NaN", found.nan), ("infinity", infinite)) if count]
    where = f" It is in {rows_of(first.detail.rows)}." if first.detail.rows.any() else ""
    zeros = f", {given.summary.zeros} of them 0" if given.summary.zeros else ""
    wide = [one for one in evidence.of("data") if one.detail.summary.abs_max > UNSCALED]
    scale = "".join(
        f" '{one.frame.name}' reaches {one.detail.summary.abs_max:.3g}."
        for one in wide
        if one.frame.name.startswith("x")
    )
    reasons = []
    if found.nan:
        reasons.append("NaN comes of 0/0, infinity minus infinity, a root or a logarithm of a "
                       "negative number, an arccosine beyond 1")  # fmt: skip
    if infinite:
        reasons.append("infinity comes of 1/0, a logarithm of 0, an exponential beyond 88")
    yield Cause(
        "a function outside its domain",
        f"{what} {' and '.join(kinds)} of finite numbers: of "
        f"'{before.frame.label}', {given.low:.3g} to {given.high:.3g}{zeros}.{where}{scale}",
        f"{'; '.join(reasons)}. Clip what goes in, add a small number to what is divided by, take "
        f"the maximum off before an exponential{', scale the data' if scale else ''}.",
    )


def _reaches(found: Found, limit: float) -> bool:
    return found.detail.summary.abs_max > limit


def half_precision(evidence: Evidence) -> Iterator[Cause]:
    """Beyond 65504, the largest float16."""
    first = evidence.first
    at = evidence.found.index(first)
    near = [
        one
        for one in evidence.found[max(0, at - 4) : at + 1]
        if one.frame.dtype == "float16" and one.detail.summary.abs_max > HALF_MAX / 16
    ]
    if first.frame.dtype != "float16":
        return
    largest = max(near, key=lambda one: one.detail.summary.abs_max, default=None)
    seen = (
        f"'{largest.frame.label}' reaches {largest.detail.summary.abs_max:.4g}, near the largest "
        "float16, 65504."
        if largest is not None
        else f"'{first.frame.label}' is float16, whose largest number is 65504."
    )
    if largest is None and not (
        first.detail.summary.positive_inf + first.detail.summary.negative_inf
    ):
        return
    yield Cause(
        "an overflow of float16",
        seen,
        "scale what goes into it, as attention divides its scores by the root of their width; run "
        "it and what follows it in float32 (dtype='float32'); or use mixed_bfloat16, which has the "
        "range of float32.",
    )


def blow_up(evidence: Evidence) -> Iterator[Cause]:
    """Gradients that grew in the last steps, or numbers that are enormous already."""
    growth: dict[str, tuple[float, float, float]] = {}  # the last, a step, and in all
    history = list(evidence.history)
    for name in history[-1] if history else ():
        values = [past[name] for past in history if past.get(name, 0.0) > 0]
        values = [value for value in values if np.isfinite(value)][-6:]
        if len(values) >= 3:
            whole = values[-1] / values[0]
            growth[name] = values[-1], whole ** (1 / (len(values) - 1)), whole
    growth.pop("loss", None)
    grown = {name: one for name, one in growth.items() if one[1] > 1.5 and one[2] > 10}
    if grown and 2 * len(grown) >= len(growth):
        leader = max(grown, key=lambda name: grown[name][1])
        size, factor, _ = grown[leader]
        yield Cause(
            "gradients that blow up",
            f"In the last steps {len(grown)} of {len(growth)} gradients grew; most that of "
            f"'{leader}', by a factor of {factor:.3g} a step, to {size:.3g}.",
            "lower the learning rate, warm it up, or clip gradients (global_clipnorm=1.0 of any "
            "Keras optimizer).",
        )
        return
    at = evidence.found.index(evidence.first)
    enormous = [
        one
        for one in evidence.found[:at]
        if one.frame.dtype != "float16"
        and one.frame.kind not in ("data", "learning rate")
        and _reaches(one, LARGE if one.frame.kind == "weight" else SQUARED_IS_FINITE)
    ]
    if enormous:
        largest = max(enormous, key=lambda one: one.detail.summary.abs_max)
        yield Cause(
            "gradients that blow up",
            f"'{largest.frame.label}' reaches {largest.detail.summary.abs_max:.3g} in this step, "
            "before anything is infinite.",
            "lower the learning rate, or clip gradients (global_clipnorm=1.0 of any Keras "
            "optimizer); if this is the first step, look at initial weights and the scale of the "
            "data.",
        )


def backward(evidence: Evidence) -> Iterator[Cause]:
    """All is finite forward, and a gradient is not."""
    first = evidence.first
    if first.frame.kind not in ("gradient", "weight gradient"):
        return
    if any(one.frame.kind == "loss" and not one.is_finite for one in evidence.found):
        return
    kinds = ("input", "pre-activation", "output")
    names = [first.frame.name, *first.frame.source]
    zeros = [
        one
        for name in names
        for one in evidence.of(*kinds)
        if one.detail.summary.zeros and one.frame.name == name
    ]
    seen = "".join(
        f" '{one.frame.label}' has {_counted(one.detail.summary.zeros, 'zero')}."
        for one in zeros[:2]
    )
    source = " and ".join(f"'{name}'" for name in first.frame.source)
    where = (
        f"the gradient that {source} gives back to '{first.frame.name}' is not"
        if source
        else f"the gradient is not: what follows '{first.frame.name}' has no finite derivative "
        "somewhere"
    )
    rows = f" It is in {rows_of(first.detail.rows)}." if first.detail.rows.any() else ""
    yield Cause(
        "a function whose derivative is infinite",
        f"All is finite forward, loss included, and {where}.{seen}"
        f"{rows if first.frame.kind == 'gradient' else ''}",
        f"look in {source or 'it'} for a root, a norm, a logarithm or a power at 0, and for "
        "tf.where around one of them: add a small number inside, and give both branches of "
        "tf.where finite numbers.",
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def update(evidence: Evidence) -> Iterator[Cause]:
    """Finite gradients, and a new value that is not."""
    if evidence.first.frame.kind == "update":
        one = evidence.first
        yield Cause(
            "an update out of range",
            f"Gradient and learning rate are finite, and the new value of '{one.frame.name}' is "
            "not.",
            "lower the learning rate; give the optimizer a larger epsilon (in float16 nothing "
            "below 1e-4), and keep weights in float32.",
        )
