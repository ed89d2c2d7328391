"""Rules for causes in layers and their gradients."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd.finite import SQUARED_IS_FINITE
from tfwd.numerics.bad_step_report import Cause
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.large_inputs import large_inputs
from tfwd.numerics.causes.overflow import (
    exp_limit,
    exploding_gradients,
    is_beyond_exp,
    overflows_half,
)
from tfwd.numerics.tensor_measurements import (
    Measurement,
    columns_text,
    positions_text,
    whole_columns,
)

NORMALIZING = (
    "BatchNormalization",
    "LayerNormalization",
    "GroupNormalization",
    "UnitNormalization",
)


def normalization(evidence: Evidence) -> Iterator[Cause]:
    """Checks for a layer that divides by the root of a variance near zero."""
    first = evidence.first
    if first.frame.kind == "output":
        name, given = first.frame.name, evidence.before
    elif first.frame.kind == "gradient" and len(first.frame.source) == 1:
        # This is the gradient that the layer `source` returns to the layer before it.
        name = first.frame.source[0]
        given = _output(evidence, first.frame.name)
    else:
        return
    output = _output(evidence, name)
    if output is None or output.frame.layer not in NORMALIZING:
        return
    kind = output.frame.layer
    epsilon = getattr(evidence.layer(name), "epsilon", None)
    value = "" if epsilon is None else f" = {epsilon}"
    what = f"the output of a {kind}, which divides"
    if first.frame.kind == "gradient":
        what = f"the gradient that '{name}' returns. '{name}' is a {kind}, which divides"
    detail = ""
    advice = (
        "use a larger epsilon (1e-3; in float16 at least 1e-4) or a larger batch, and look for "
        "units before this layer that are the same for all examples."
    )
    if given is not None and given.detail.low == given.detail.high:
        detail = f" Its input is {given.detail.low:g} everywhere."
    elif first.detail.columns.any() and not first.detail.columns.all():
        columns = first.detail.columns
        word = "columns are" if columns.sum() > 1 else "column is"
        detail = f" The non-finite {word} {positions_text(columns)}."
    if kind == "BatchNormalization" and evidence.batch_size == 1:
        detail = " The batch has 1 example, so the variance of each unit is 0."
        advice = (
            "use a larger epsilon (1e-3), and drop such batches (drop_remainder=True) or "
            "choose a batch size that leaves no last batch of 1."
        )
    if kind in ("LayerNormalization", "GroupNormalization"):
        rows = evidence.rows_text(first)
        detail += f" The non-finite elements are in {rows}." if rows else ""
        advice = (
            "use a larger epsilon (1e-3; in float16 at least 1e-4), and look for examples whose "
            "units before this layer are all the same."
        )
    if kind == "UnitNormalization":
        yield Cause(
            "a division of 0 by 0",
            f"The first non-finite tensor is {what} by the norm of each vector.{detail}",
            "look for vectors that are 0, or so small that their squares are 0.",
        )
        return
    yield Cause(
        "a variance near zero",
        f"The first non-finite tensor is {what} by the root of a variance plus epsilon"
        f"{value}.{detail}",
        advice,
    )


def _output(evidence: Evidence, name: str) -> Measurement | None:
    """Returns the measurement of a layer's output; None if the output was not checked."""
    return next((one for one in evidence.of("output") if one.frame.name == name), None)


def domain(evidence: Evidence) -> Iterator[Cause]:
    """Checks for a function outside its domain, which turns finite numbers into non-finite ones."""
    first, before = evidence.first, evidence.before
    what = f"'{first.frame.name}' makes"
    if first.frame.kind == "input" and before is not None:
        what = f"The code between '{before.frame.label}' and '{first.frame.label}' makes"
    if first.frame.kind == "loss":
        bad = [one for one in evidence.predictions if not one.is_finite]
        first = next(iter(bad), first)
        what = "The code of the model after its last layer makes"
    if first.frame.kind not in ("input", "output", "pre-activation", "prediction"):
        return
    if before is None:
        return
    found = first.detail.summary
    overflowing = [
        one for one in evidence.tensors_before if found.positive_inf and is_beyond_exp(one)
    ]
    if overflowing and first is evidence.first:
        before = overflowing[-1]
    elif first is evidence.first and first.frame.kind == "output":
        before = evidence.tensors_before[-1]
    given, is_known = _given_text(evidence, before)
    infinite = found.positive_inf + found.negative_inf
    kinds = [word for word, count in (("NaN", found.nan), ("infinity", infinite)) if count]
    where = ""
    columns = whole_columns(first.detail)
    if columns.any() and not columns.all():
        where = f" The non-finite elements are all elements of {columns_text(columns)}."
        where += _input_in_columns(columns, before) if is_known else ""
    elif rows := evidence.rows_text(first):
        where = f" The non-finite elements are in {rows}."
    if infinite and not found.nan and not overflowing and found.abs_max > SQUARED_IS_FINITE:
        fits, clip = _of_exponential(evidence, before)
        yield Cause(
            "an overflow in the forward pass",
            f"{what} infinity from finite numbers. The largest finite result is "
            f"{found.abs_max:.3g}. {given}{where}{fits}",
            "scale the factors of the product, or the terms of the sum, before they are combined"
            f"{clip}.",
        )
        return
    where += _input_at_position(evidence, first, before) if is_known else ""
    scale = large_inputs(evidence, "x")
    overflow = f"a product or a sum beyond {float(tf.as_dtype(first.frame.dtype).max):.2g}"
    reasons = []
    if found.nan:
        reasons.append(
            "NaN comes from 0/0, 0 times infinity, infinity minus infinity, infinity divided by "
            "infinity, an arccosine beyond 1, or a root, a fractional power or a logarithm of a "
            "negative number"
        )
        if first.frame.dtype == "float16":
            reasons.append(
                "in float16, a constant beyond 65504 is infinity, such as a mask of -1e9: use -3e4"
            )
    if overflowing:
        what_exp = "data above" if before.frame.kind == "data" else "an output above"
        limit = f"{exp_limit(before):.3g}, the limit of {before.frame.dtype}"
        reasons.append(f"+infinity comes from the exponential of {what_exp} {limit}")
    elif found.positive_inf:
        reasons.append(
            f"+infinity comes from 1/0, an exponential beyond {exp_limit(first):.3g}, minus a "
            f"logarithm of 0, or {overflow}"
        )
    if found.negative_inf:
        reasons.append(f"-infinity comes from a logarithm of 0, from -1/0, or from {overflow}")
    advice = (
        f"clip '{before.frame.name}' before the exponential, as with tf.clip_by_value(.., -20, 20),"
        " or subtract its maximum; a lower learning rate or clipped gradients keep it small"
        if overflowing
        else "clip the inputs, add a small number to the divisor, or subtract the maximum "
        "before an exponential"
    )
    yield Cause(
        "a function outside its domain",
        f"{what} {' and '.join(kinds)} from finite numbers. {given}{where}{scale}",
        f"{advice}{'; scale the data' if scale else ''}. ({'; '.join(reasons)}.)",
    )


def _of_exponential(evidence: Evidence, before: Measurement) -> tuple[str, str]:
    """Returns that an exponential of a multiple of the input fits, and advice. Otherwise "".

    All infinities must be positive, the input must be moderate, and the code must be custom.
    """
    first = evidence.first
    layer = evidence.layer(first.frame.name)
    is_custom = isinstance(layer, keras.layers.Lambda) or not _keras.is_of_keras(type(layer))
    is_moderate = before.detail.summary.abs_max <= exp_limit(first)
    if first.frame.kind != "input" and not is_custom:
        return "", ""
    if not is_moderate or first.detail.summary.negative_inf:
        return "", ""
    return (
        " The input is moderate: this fits an exponential of a multiple of the input, or a product "
        "with a very large number.",
        "; if the code has an exponential, multiply by a smaller number before it, or clip its "
        "argument",
    )


def _given_text(evidence: Evidence, before: Measurement) -> tuple[str, bool]:
    """Returns the range of a function's input as text, and True if the input is known.

    If the layer has several calls and the input of this call is not known, the text has the ranges
    of the inputs of all calls.
    """
    first, calls = evidence.first.frame, evidence.calls
    is_inside = before.frame.name.startswith(f"{first.name}/")
    is_shared = calls > 1 and first.kind in ("pre-activation", "output") and not is_inside
    if not is_shared or evidence.inputs_of_call or before.frame.kind == "data":
        return f"The values of '{before.frame.label}' are {_range_text(before)}.", True
    given = [f"'{x.frame.label}' {_range_text(x)}" for x in evidence.inputs_of_calls[-3:]]
    text = f"'{first.name}' is called {calls} times"
    if not given:
        return f"{text}, and the input of this call is not known.", False
    return f"{text}. Its inputs include {'; '.join(given)}.", False


def _range_text(found: Measurement) -> str:
    detail = found.detail
    zeros = f", with {detail.summary.zeros} zeros" if detail.summary.zeros else ""
    return f"from {detail.low:.3g} to {detail.high:.3g}{zeros}"


def _input_in_columns(columns: np.ndarray, before: Measurement) -> str:
    """Returns the function's input in the non-finite columns, as text, if it is one number."""
    lows, highs = before.detail.column_lows, before.detail.column_highs
    if lows.shape != columns.shape or lows[columns].min() != highs[columns].max():
        return ""
    return f" There, '{before.frame.label}' is {lows[columns][0]:g} for all examples."


def _input_at_position(evidence: Evidence, first: Measurement, before: Measurement) -> str:
    """Returns the function's input at the only non-finite position, as text."""
    values = evidence.data.get(before.frame.name) if before.frame.kind == "data" else None
    given = evidence.rows_of(first), first.detail.columns
    rows, columns = (np.flatnonzero(one) for one in given)
    if values is None or values.ndim != 2 or len(rows) != 1 or len(columns) != 1:
        return ""
    if first.detail.width != values.shape[1]:
        return ""
    value = values[rows[0], columns[0]]
    return f" In column {columns[0]} of this row, '{before.frame.name}' is {value:.3g}."


def backward(evidence: Evidence) -> Iterator[Cause]:
    """Checks for a non-finite gradient after a finite forward pass."""
    first = evidence.first
    if first.frame.kind not in ("gradient", "weight gradient"):
        return
    if any(one.frame.kind == "loss" and not one.is_finite for one in evidence.found):
        return
    overflows = not first.detail.summary.nan and any(exploding_gradients(evidence))
    if overflows or overflows_half(evidence):
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
    weight = f"the gradient of weight '{first.frame.name}' is not"
    where = (
        weight
        if first.frame.kind == "weight gradient"
        else (
            f"the gradient that {source} returns to '{first.frame.name}' is not"
            if source
            else "the gradient is not: the loss function, or code after layer "
            f"'{first.frame.name}', has no finite derivative for some value"
        )
    )
    rows = evidence.rows_text(first)
    rows = rows and f" The non-finite elements are in {rows}."
    if not source:
        rows += _loss_inputs_text(evidence, first)
    yield Cause(
        "a function whose derivative is infinite",
        f"The forward pass and the loss are finite, but {where}.{seen}"
        f"{rows if first.frame.kind == 'gradient' else ''}",
        f"look in {source or 'this code'} for a root, a norm, a logarithm or a power at 0, for "
        "atan2 at (0, 0), and for tf.where around one of them: add a small number inside, and give "
        "both branches of tf.where finite numbers.",
    )


def _loss_inputs_text(evidence: Evidence, first: Measurement) -> str:
    """Returns the loss's inputs in the first row with a non-finite gradient, as text."""
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
