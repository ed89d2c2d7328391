"""Rules for causes in the loss function of one output."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tfwd import _keras
from tfwd.finite import SQUARED_IS_FINITE
from tfwd.numerics.bad_step_report import Cause
from tfwd.numerics.causes import class_labels
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.exponential_losses import (
    exponential_of_multiple,
    overflowing_exponential,
)
from tfwd.numerics.causes.loss_findings import Findings, Loss
from tfwd.numerics.causes.loss_rows import (
    UNKNOWN,
    labels_and_predictions,
    reasons,
    sample_weights,
    value_range,
)
from tfwd.numerics.causes.losses_by_output import of_single_output
from tfwd.numerics.causes.losses_of_other_numbers import (
    equal_numbers,
    equal_text,
    labels_of_zero,
    may_be_of_ends,
    may_need_positive,
    number_of_bad_predictions,
    scaled_down,
)
from tfwd.numerics.causes.overflow import exp_limit, is_beyond_exp
from tfwd.numerics.tensor_measurements import rows_text


def causes(evidence: Evidence) -> Iterator[Cause]:
    """Checks the loss of one output, or of all if the output is unknown."""
    if evidence.first.frame.kind != "loss" or any(
        one.detail.summary.abs_max > SQUARED_IS_FINITE for one in evidence.predictions
    ):
        return
    if not all(one.is_finite for one in evidence.predictions):  # computed after the last layer
        return
    loss = Loss(evidence)
    found = _explanation(loss)
    if not found.by:
        _check_inputs(loss, found)
    _check_labels(loss, found)
    _check_weights_of_zero(loss, found)
    if not loss.is_nan and not found.signs:
        _check_exponentials(loss, found)
    _add_general_advice(loss, found)
    yield _custom_loss_cause(loss, found) if loss.is_own else _cause(loss, found)


def _explanation(loss: Loss) -> Findings:
    """Looks for one explanation that fits the loss of other numbers and of all rows."""
    evidence, bad = loss.evidence, loss.bad
    for by, rule in (
        ("exponential", lambda: overflowing_exponential(evidence, bad, loss.squares)),
        ("numbers", lambda: equal_numbers(evidence, bad)),
        ("numbers", lambda: labels_of_zero(evidence, bad)),
        ("numbers", lambda: exponential_of_multiple(evidence, loss.squares)),
    ):
        text, advice = rule()
        if text:
            return Findings([text], list(advice), by)
    if largest := scaled_down(evidence):
        sign = f"the predictions reach {largest:.3g}, and it is finite if they are scaled down"
        where = f"its non-finite values are in {rows_text(bad)}; " * bool(bad.any())
        clip = "clip the argument of an exponential or a power, or scale the predictions down"
        return Findings([where + sign], [clip], "numbers")
    if bad.any() and (exactly := reasons(evidence, bad)):
        where = f"its non-finite values are in {rows_text(bad)}"
        sign = f"{where}, and only there {' and '.join(exactly)}"
        clip = "clip the argument of a logarithm or a root, and the divisor"
        return Findings([sign], [clip], "rows")
    return Findings()


def _check_inputs(loss: Loss, found: Findings) -> None:
    """Adds the rows of the non-finite values, and ranges outside the domain of a function."""
    bad, does = loss.bad, "es" * loss.is_own
    if bad.any() and not bad.all():
        found.signs.append(f"its non-finite values are only in {rows_text(bad)}")
    tried = 0 if loss.labels_are_too_large else number_of_bad_predictions(loss.evidence)
    if tried:
        found.by = "labels"
        found.signs.append(
            f"none of {tried} other predictions that were tried gives a finite loss"
            f"{_range_of_labels(loss)}"
        )
        found.advice.append(
            "look at what the loss computes of the labels: a mean over no elements, such as a "
            "class without examples, is 0/0"
        )
        return
    for one in loss.inputs:
        what = f"'{one.frame.label}'" if loss.is_own else "the predictions"
        low, high = value_range(one, bad)
        ends = [end for end, there in (("0", low == 0), ("1", high == 1)) if there]
        if ends and not loss.squares and may_be_of_ends(loss.evidence):
            found.reaches_ends = True
            found.signs.append(
                f"{what} reach{does} {' and '.join(ends)} exactly, where a logarithm is infinite"
            )
            if loss.is_entropy:
                found.advice.append(
                    "give the loss logits (from_logits=True) instead of probabilities"
                )
            found.advice.append(
                "clip the argument of a logarithm (tf.clip_by_value(p, 1e-7, 1 - 1e-7))"
            )
        elif low < 0 and loss.is_nan and not (loss.squares or loss.is_logits):
            if loss.labels_are_too_large or not may_need_positive(loss.evidence):
                continue
            found.signs.append(
                f"{what} go{does} down to {low:.3g}, and a logarithm, a root or a fractional power "
                "of a negative number is NaN"
            )
            found.advice.append("clip the argument of a logarithm or a root")


def _range_of_labels(loss: Loss) -> str:
    """Returns the range of the labels in brackets; "" if they are no numbers."""
    given = labels_and_predictions(loss.evidence)
    if given is None or not given[0].size or given[0].dtype.kind not in "fiu":
        return ""
    low, high = float(given[0].min()), float(given[0].max())
    return f" (all labels are {low:.3g})" if low == high else f" (labels: {low:.3g} to {high:.3g})"


def _check_labels(loss: Loss, found: Findings) -> None:
    """Adds unusual properties of the labels."""
    evidence, bad = loss.evidence, loss.bad
    for name, values in evidence.data.items():
        if not name.startswith("y") or not np.issubdtype(values.dtype, np.number):
            continue
        in_bad_rows = values[bad] if bad.any() else values
        is_unknown = labels_and_predictions(evidence) is None
        are_equal = loss.is_nan and is_unknown and bool(equal_text("labels", values))
        largest = float(np.abs(in_bad_rows).max()) if values.size else 0.0
        if largest > SQUARED_IS_FINITE:
            square = "and a square or a product of such a number may be infinite"
            if "squared" in loss.of_keras.lower():
                is_sum = largest**2 <= float(np.finfo("float32").max)
                square = f"{'and a sum of such squares' if is_sum else 'whose square'} is infinite"
            found.signs.append(f"'{name}' reaches {largest:.3g}, {square}")
            found.advice.append("scale the labels")
            found.labels_are_large = True
        elif not loss.squares and class_labels.has_columns(values):
            if (
                loss.is_entropy
                or class_labels.may_be_classes(values, bad)
                or any(map(class_labels.has_distributions, loss.inputs))
            ):
                found.signs += class_labels.class_signs(name, values, bad)
        elif found.by == "numbers" or are_equal:
            pass
        elif values.size and not values.any() and class_labels.may_be_any_row(bad):
            found.signs.append(f"all elements of '{name}' are 0")
        if are_equal:
            found.signs.append(
                f"all elements of '{name}' are equal ({float(values.flat[0]):.3g}), and a division "
                "of 0 by their deviation is 0/0"
            )


def _check_weights_of_zero(loss: Loss, found: Findings) -> None:
    """Adds that the product of an infinite loss and a weight of 0 is NaN."""
    evidence = loss.evidence
    if loss.is_nan or not evidence.first.detail.summary.nan:
        return
    weights = sample_weights(evidence)
    zeros = UNKNOWN if weights is None else weights.reshape(len(weights), -1) == 0
    if zeros.size and zeros.shape[:1] == loss.bad.shape and zeros[loss.bad].any():
        what = "a sample weight"
    elif (of_single_output(evidence) or evidence).loss_weight == 0:
        what = "a weight in loss_weights"
    else:
        return
    found.signs.append(f"an infinite loss times {what} of 0 is NaN")
    found.advice.append(f"{what} of 0 does not leave out an infinite loss: make it finite")


def _check_exponentials(loss: Loss, found: Findings) -> None:
    """Adds the output of a layer whose exponential is infinite."""
    outputs = [one for one in loss.evidence.of("output") if is_beyond_exp(one)]
    if outputs:
        least = min(outputs, key=lambda one: one.detail.high)
        found.signs.append(
            f"'{least.frame.label}' reaches {least.detail.high:.3g}, and an exponential of more "
            f"than {exp_limit(least):.3g} is infinite"
        )
        found.advice.append("clip the argument of an exponential")


def _add_general_advice(loss: Loss, found: Findings) -> None:
    """Adds what to look for if no explanation was found."""
    is_told = found.reaches_ends or found.by in ("exponential", "numbers")
    if found.by in ("numbers", "labels") or loss.labels_are_too_large:
        pass
    elif loss.is_nan and not (loss.squares or loss.is_entropy or is_told):
        found.advice.append(
            "look for a logarithm of 0 or of a negative number, a mean over no elements, a "
            "division by a norm of 0, or an exponential that overflows, as with a small "
            "temperature: tf.reduce_logsumexp subtracts the maximum"
        )
    elif not (loss.squares or found.advice):
        found.advice.append(
            "look for a logarithm of 0 in the loss, and for an exponential of a multiple of the "
            "predictions"
        )
    if not (loss.of_keras or found.labels_are_large or (found.advice and is_told)):
        found.advice.append("add a small number to the divisor")


def _cause(loss: Loss, found: Findings) -> Cause:
    """Returns the cause if the training step computes the loss by `compute_loss`."""
    frame = loss.evidence.first.frame
    names = " or ".join(repr(one) for one in dict.fromkeys(frame.source))
    name = f" {names}" * bool(names) + frame.of_outputs
    nothing = "nothing is known of the labels"
    if loss.evidence.data:
        nothing = "nothing in predictions and labels is unusual"
    return Cause(
        "the loss function",
        f"All outputs of the model are finite, but the loss{name} is "
        f"{'NaN' if loss.is_nan else 'not'}: "
        f"{'; '.join(found.signs) or nothing}.",
        "; ".join(dict.fromkeys(found.advice or ["compare the labels with the predictions"])) + ".",
    )


def _custom_loss_cause(loss: Loss, found: Findings) -> Cause:
    """Returns the cause if a training step computes the loss without `compute_loss`."""
    evidence = loss.evidence
    is_custom_step = bool(evidence.data) and not _keras.is_own_step(evidence.model)
    where = "from outputs that are not dense tensors"
    if not evidence.data:
        where = "in the training loop"
    elif is_custom_step:
        where = "in a custom train_step"
    ranges = [
        f"'{one.frame.label}' {one.detail.low:.3g} to {one.detail.high:.3g}"
        for one in (*evidence.outputs_before[-3:], *evidence.of("data"))
        if one.frame.kind != "data" or one.frame.name.startswith("y")
    ]
    shown = f" Ranges: {', '.join(ranges)}." if ranges else ""
    seen = f" {'; '.join(found.signs)}." if found.signs else ""
    advice = [
        *found.advice,
        "compare these ranges with the formula of the loss",
        "tf.debugging.enable_check_numerics() names the operation (without jit_compile)",
    ]
    if is_custom_step:
        advice.append("or compute the loss by self.compute_loss, so that each example is checked")
    return Cause(
        "the loss function",
        f"The outputs of layers are finite, but the loss is {'NaN' if loss.is_nan else 'not'}. The "
        f"loss is computed {where}, which this report does not examine.{shown}{seen}",
        "; ".join(dict.fromkeys(advice)) + ".",
    )
