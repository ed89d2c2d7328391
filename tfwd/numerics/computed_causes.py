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
    advice = (
        "use a larger epsilon (1e-3; in float16 nothing below 1e-4), a larger batch, and look for "
        "units before it that are the same for all examples."
    )
    if before is not None and before.detail.low == before.detail.high:
        given = f" Its input is {before.detail.low:g} everywhere."
    if kind == "BatchNormalization" and evidence.batch_size == 1:
        given = " The batch has 1 example, so the variance of each unit is 0."
        advice = (
            "use a larger epsilon (1e-3), and leave such batches out (drop_remainder=True) or "
            "choose a batch size that leaves no last batch of 1."
        )
    yield Cause(
        "a variance near zero",
        f"The first that is not finite comes out of a {kind}, which divides by the root of a "
        f"variance plus epsilon = {epsilon}.{given}",
        advice,
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
    where += _given_there(evidence, first, before)
    scale = _unscaled(evidence, "x")
    reasons = []
    if found.nan:
        reasons.append("NaN comes of 0/0, infinity minus infinity, a root or a logarithm of a "
                       "negative number, an arccosine beyond 1")  # fmt: skip
    if found.positive_inf:
        reasons.append("+infinity comes of 1/0, an exponential beyond 88, minus a logarithm of 0")
    if found.negative_inf:
        reasons.append("-infinity comes of a logarithm of 0, or of -1/0")
    yield Cause(
        "a function outside its domain",
        f"{what} {' and '.join(kinds)} of finite numbers: of "
        f"'{before.frame.label}', {given.low:.3g} to {given.high:.3g}{zeros}.{where}{scale}",
        f"{'; '.join(reasons)}. Clip what goes in, add a small number to what is divided by, take "
        f"the maximum off before an exponential{', scale the data' if scale else ''}.",
    )


def _unscaled(evidence: Evidence, prefix: str) -> str:
    """What is far from 1 of the data whose names begin so, a sentence each."""
    return "".join(
        f" '{one.frame.name}' reaches {one.detail.summary.abs_max:.3g}."
        for one in evidence.of("data")
        if one.frame.name.startswith(prefix) and one.detail.summary.abs_max > UNSCALED
    )


def _given_there(evidence: Evidence, first: Found, before: Found) -> str:
    """What a function of each element was given in the one place that is not finite."""
    values = evidence.data.get(before.frame.name) if before.frame.kind == "data" else None
    rows, columns = (np.flatnonzero(one) for one in (first.detail.rows, first.detail.columns))
    if values is None or values.ndim != 2 or len(rows) != 1 or len(columns) != 1:
        return ""
    if first.detail.width != values.shape[1]:
        return ""
    value = values[rows[0], columns[0]]
    return f" In column {columns[0]} of it '{before.frame.name}' is {value:.3g}."


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
    if evidence.before is not None and first.frame.kind == "output":
        given, made = evidence.before.detail.summary.abs_max, first.detail.summary.abs_max
        if largest is None and max(given, made) < HALF_MAX / 16:
            seen += (
                f" It is given at most {given:.3g}, and what is finite of it is at most "
                f"{made:.3g}: something in between is larger, as a sum of many or a square."
            )
    if largest is None and not (
        first.detail.summary.positive_inf + first.detail.summary.negative_inf
    ):
        return
    yield Cause(
        "an overflow of float16",
        seen,
        "divide before a sum or a product and not after it, as attention divides by the root of "
        "the width; run this layer in float32 (dtype='float32'); or use mixed_bfloat16, which has "
        "the range of float32.",
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
        scale = _unscaled(evidence, "")
        yield Cause(
            "gradients that blow up",
            f"'{largest.frame.label}' reaches {largest.detail.summary.abs_max:.3g} in this step, "
            f"before anything is infinite.{scale}",
            f"{'scale the data, labels too; ' if scale else ''}lower the learning rate, or clip "
            "gradients (global_clipnorm=1.0 of any Keras optimizer); if it is among the first "
            "steps, look at initial weights and the scale of the data.",
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
        else f"the gradient is not: what follows '{first.frame.name}', which is no layer but the "
        "loss function or what is computed before it, has no finite derivative somewhere"
    )
    rows = f" It is in {rows_of(first.detail.rows)}." if first.detail.rows.any() else ""
    if not source:
        rows += _prediction_there(evidence, first)
    yield Cause(
        "a function whose derivative is infinite",
        f"All is finite forward, loss included, and {where}.{seen}"
        f"{rows if first.frame.kind == 'gradient' else ''}",
        f"look in {source or 'it'} for a root, a norm, a logarithm or a power at 0, and for "
        "tf.where around one of them: add a small number inside, and give both branches of "
        "tf.where finite numbers.",
    )


def _prediction_there(evidence: Evidence, first: Found) -> str:
    """What the loss was given in the first row in which a gradient is not finite."""
    labels = [values for name, values in evidence.data.items() if name.startswith("y")]
    rows = np.flatnonzero(first.detail.rows)
    if len(evidence.predictions) != 1 or len(labels) != 1 or not rows.size:
        return ""
    given = [np.asarray(evidence.predictions[0].detail.values), labels[0]]
    for one in given:
        if not one.shape or len(one) != len(first.detail.rows) or one[0].size > 4:
            return ""
        if not np.issubdtype(one.dtype, np.number):
            return ""
    shown = [", ".join(f"{x:.3g}" for x in np.ravel(one[rows[0]])) for one in given]
    return f" In row {rows[0]} the prediction is {shown[0]} and the label {shown[1]}."


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
