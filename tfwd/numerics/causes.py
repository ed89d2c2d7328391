"""Likely causes of a step that is not finite, told by what was found. See `docs/non_finite.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tfwd import _keras
from tfwd.numerics.details import places
from tfwd.numerics.evidence import Evidence
from tfwd.numerics.report import Cause

HALF_MAX = 65504.0
HUGE = 1e15  # whose square is a float32 by far
NORMALIZING = (
    "BatchNormalization",
    "LayerNormalization",
    "GroupNormalization",
    "UnitNormalization",
)


def likely(evidence: Evidence) -> list[Cause]:
    """The causes that fit, the best supported first."""
    if all(one.is_finite for one in evidence.found):
        return []
    # What is wrong before the model computes anything explains the rest.
    given = [cause for rule in GIVEN for cause in rule(evidence)]
    return given or [cause for rule in COMPUTED for cause in rule(evidence)]


def _data(evidence: Evidence) -> Iterator[Cause]:
    for one in evidence.bad("data"):
        detail, name = one.detail, one.frame.name
        what = "labels" if name.startswith("y") else "input" if name.startswith("x") else name
        where = f"rows {places(detail.rows)} of the batch" if detail.rows.size else "a scalar"
        if detail.columns.size:
            where += f", columns {places(detail.columns)}"
        yield Cause(
            f"NaN or infinity in the {what}",
            f"'{name}' has {detail.summary} in {where}.",
            "find these examples in the data; leave them out or fill the gaps before training, as "
            "with numpy.nan_to_num, and look at how they were made.",
        )


def _weights(evidence: Evidence) -> Iterator[Cause]:
    bad = evidence.bad("weight")
    if not bad:
        return
    names = ", ".join(f"'{one.frame.name}'" for one in bad[:3])
    more = f" and {len(bad) - 3} others" if len(bad) > 3 else ""
    when = {
        True: "No step of this training was made before: they came so, from a file or an "
        "initializer.",
        False: "They were finite after the step before: something else assigned to them since.",
        None: "They came so, or an earlier step has made them so: look at the first one.",
    }[evidence.is_first]
    yield Cause(
        "weights that are not finite already",
        f"{names}{more} are not finite before the step. {when}",
        "load an earlier checkpoint, and test each file with numpy.isfinite before training.",
    )


def _learning_rate(evidence: Evidence) -> Iterator[Cause]:
    for one in evidence.bad("learning rate"):
        value = one.detail.low if one.detail.summary.non_finite == 0 else "not finite"
        yield Cause(
            "a learning rate that is not finite or negative",
            f"The learning rate of this step is {value}.",
            "look at the schedule: a division by a number of steps that is 0, a root or a "
            "logarithm of a negative number, a decay that goes below 0.",
        )
        return


def _labels(evidence: Evidence) -> Iterator[Cause]:
    if "sparse" not in evidence.loss.lower() or not evidence.predictions:
        return
    classes = evidence.predictions[0].detail.width
    for name, values in evidence.data.items():
        if not name.startswith("y") or not np.issubdtype(values.dtype, np.number):
            continue
        outside = (values < 0) | (values >= classes)
        if outside.any():
            rows = outside.reshape(len(values), -1).any(1) if values.ndim else outside
            wrong = sorted({int(v) for v in values[outside].ravel()})[:5]
            yield Cause(
                "a label out of range",
                f"'{name}' has the labels {', '.join(map(str, wrong))} in rows {places(rows)} of "
                f"the batch, and the model has {classes} classes, 0 to {classes - 1}.",
                "number the labels from 0, or give the last layer as many units as there are "
                "labels.",
            )


def _nothing_left(evidence: Evidence) -> Iterator[Cause]:
    for name, values in evidence.data.items():
        if name.startswith("sample_weight") and values.size and not values.any():
            yield Cause(
                "nothing is left to divide by",
                f"'{name}' is 0 for all {len(values)} examples of the batch.",
                "leave such batches out, or divide by a number that is at least 1.",
            )
    before, first = evidence.before, evidence.first
    if before is None or first.frame.kind not in ("input", "output", "pre-activation", "loss"):
        return
    summary = before.detail.summary
    if summary.size and summary.zeros == summary.size and first.detail.summary.nan:
        yield Cause(
            "nothing is left to divide by",
            f"All {summary.size} elements of '{before.frame.label}' are 0, and what is computed of "
            "them is NaN: 0/0.",
            "look for a mask or a dropout rate that leaves nothing, and for a mean or a norm of "
            "it; add a small number to what is divided by.",
        )


def _normalization(evidence: Evidence) -> Iterator[Cause]:
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


def _loss(evidence: Evidence) -> Iterator[Cause]:
    huge = any(one.detail.summary.abs_max > HUGE for one in evidence.predictions)
    if evidence.first.frame.kind != "loss" or huge:
        return
    signs = []
    for one in evidence.predictions:
        detail = one.detail
        if detail.low == 0 or detail.high == 1:
            signs.append(
                f"the predictions reach {'0' if detail.low == 0 else ''}"
                f"{' and ' if detail.low == 0 and detail.high == 1 else ''}"
                f"{'1' if detail.high == 1 else ''} exactly, where a logarithm is infinite"
            )
        elif detail.low < 0:
            signs.append(
                f"the predictions begin at {detail.low:.3g}, and a logarithm or a root of them is "
                "NaN"
            )
    for name, values in evidence.data.items():
        if not name.startswith("y") or not np.issubdtype(values.dtype, np.number):
            continue
        if values.ndim == 2 and values.shape[1] > 1:
            if (values.min() < 0) or (abs(values.sum(1) - 1) > 1e-3).any():
                signs.append(f"the rows of '{name}' are no distributions: they do not add up to 1")
            absent = np.flatnonzero(~values.any(0))
            if absent.size:
                signs.append(f"class {', '.join(map(str, absent[:5]))} is absent in the batch")
        elif values.size and not values.any():
            signs.append(f"'{name}' is 0 for the whole batch")
    nothing = "in predictions and labels stands out" if evidence.data else "is known of the labels"
    evidence_of = "; ".join(signs) or f"nothing {nothing}"
    yield Cause(
        "the loss function",
        f"All that the model computes is finite, and the loss is not: {evidence_of}.",
        "give the loss logits (from_logits=True) and no probabilities, clip what a logarithm is "
        "taken of, and add a small number to what is divided by.",
    )


def _half_precision(evidence: Evidence) -> Iterator[Cause]:
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
        "use mixed_bfloat16, which has the range of float32; or run this layer in float32 "
        "(dtype='float32'), or scale what goes into it.",
    )


def _blow_up(evidence: Evidence) -> Iterator[Cause]:
    growth: dict[str, tuple[float, float]] = {}
    history = list(evidence.history)
    for name in history[-1] if history else ():
        values = [past[name] for past in history if past.get(name, 0.0) > 0]
        values = [value for value in values if np.isfinite(value)][-6:]
        if len(values) >= 3:
            growth[name] = values[-1], (values[-1] / values[0]) ** (1 / (len(values) - 1))
    grown = {name: pair for name, pair in growth.items() if pair[1] > 1.5}
    weights = {name: pair for name, pair in grown.items() if name != "loss"}
    if weights:
        leader = max(weights, key=lambda name: weights[name][1])
        size, factor = weights[leader]
        yield Cause(
            "gradients that blow up",
            f"In the last steps {len(weights)} of {len(growth)} gradients grew; most that of "
            f"'{leader}', by a factor of {factor:.3g} a step, to {size:.3g}.",
            "lower the learning rate, warm it up, or clip gradients (global_clipnorm=1.0 of any "
            "Keras optimizer).",
        )
        return
    at = evidence.found.index(evidence.first)
    huge = [
        one
        for one in evidence.found[:at]
        if one.frame.dtype != "float16"
        and one.frame.kind not in ("data", "learning rate")
        and one.detail.summary.abs_max > HUGE
    ]
    if huge:
        largest = max(huge, key=lambda one: one.detail.summary.abs_max)
        yield Cause(
            "gradients that blow up",
            f"'{largest.frame.label}' reaches {largest.detail.summary.abs_max:.3g} in this step, "
            "before anything is infinite.",
            "lower the learning rate, or clip gradients (global_clipnorm=1.0 of any Keras "
            "optimizer); if this is the first step, look at initial weights and the scale of the "
            "data.",
        )


def _backward(evidence: Evidence) -> Iterator[Cause]:
    first = evidence.first
    if first.frame.kind not in ("gradient", "weight gradient"):
        return
    if any(one.frame.kind == "loss" and not one.is_finite for one in evidence.found):
        return
    zeros = [
        one
        for one in evidence.of("input", "pre-activation", "output")
        if one.detail.summary.zeros and one.frame.name == first.frame.name
    ]
    seen = "".join(
        f" '{one.frame.label}' has {one.detail.summary.zeros} zeros." for one in zeros[:1]
    )
    yield Cause(
        "a function whose derivative is infinite",
        "All is finite forward, loss included, and the gradient is not: what follows "
        f"'{first.frame.name}' has no finite derivative somewhere.{seen}",
        "look for a root, a norm, a logarithm or a power at 0, and for tf.where around one of "
        "them: add a small number inside, and give both branches of tf.where finite numbers.",
    )


def _update(evidence: Evidence) -> Iterator[Cause]:
    if evidence.first.frame.kind == "update":
        one = evidence.first
        yield Cause(
            "an update out of range",
            f"Gradient and learning rate are finite, and the new value of '{one.frame.name}' is "
            "not.",
            "lower the learning rate; give the optimizer a larger epsilon (in float16 nothing "
            "below 1e-4), and keep weights in float32.",
        )


GIVEN: list[Callable[[Evidence], Iterator[Cause]]] = [_data, _weights, _labels]
COMPUTED: list[Callable[[Evidence], Iterator[Cause]]] = [
    _learning_rate,
    _nothing_left,
    _normalization,
    _half_precision,
    _blow_up,
    _loss,
    _backward,
    _update,
]
