"""Rules for causes in the loss function, and in losses that layers add."""

from __future__ import annotations

import math
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tfwd._keras import losses as _keras_losses
from tfwd.finite import SQUARED_IS_FINITE
from tfwd.numerics.bad_step_report import Cause
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.exponential_losses import (
    exponential_of_multiple,
    overflowing_exponential,
)
from tfwd.numerics.causes.large_weights import large_weights
from tfwd.numerics.causes.loss_rows import (
    bad_rows,
    is_bad,
    labels_and_predictions,
    reasons,
    value_range,
)
from tfwd.numerics.causes.losses_by_output import keras_name
from tfwd.numerics.causes.losses_of_other_numbers import (
    equal_numbers,
    equal_text,
    is_finite_for_small_labels,
    labels_of_zero,
)
from tfwd.numerics.causes.overflow import exp_limit, is_beyond_exp
from tfwd.numerics.tensor_measurements import Measurement, rows_text


def loss_function(evidence: Evidence) -> Iterator[Cause]:
    """Checks for a loss that is the first non-finite tensor, separately for each output."""
    wrong = _wrong_weights(evidence) if evidence.first.frame.kind == "loss" else []
    if wrong and not any(map(is_bad, evidence.parts)):  # no output's own loss is bad
        yield Cause(
            "NaN or infinity in the loss_weights",
            f"All outputs of the model are finite. The loss_weights of compile are not: "
            f"{', '.join(wrong)}.",
            "correct the loss_weights. To leave out the loss of an output, use the weight 0.",
        )
        return
    for part in evidence.parts or [evidence]:
        yield from list(large_weights(part)) or _of_one(part)


def added(evidence: Evidence) -> Iterator[Cause]:
    """Checks for a non-finite loss that a layer adds, by a regularizer or `add_loss`."""
    first = evidence.first
    if first.frame.kind != "added loss":
        return
    name, is_nan = first.frame.name, bool(first.detail.summary.nan)
    ranges = [
        f"'{one.frame.label}' {one.detail.low:.3g} to {one.detail.high:.3g}"
        for one in evidence.of("weight", "output")
        if name in one.frame.name.split("/")
    ]
    shown = f" Ranges: {', '.join(ranges[:4])}." if ranges else ""
    yield Cause(
        "a loss that a layer adds",
        f"The outputs of layers are finite, but the loss that layer '{name}' adds is "
        f"{'NaN' if is_nan else 'infinite'}.{shown}",
        "check the layer's regularizers and its add_loss: clip the argument of an exponential, a "
        "logarithm or a root, and add a small number to a divisor.",
    )


def _wrong_weights(evidence: Evidence) -> list[str]:
    """Returns the non-finite `loss_weights` of a compiled model, as text."""
    if not isinstance(evidence.model, keras.Model):
        return []
    weights = _keras_losses.compiled_loss(evidence.model)[1]
    if isinstance(weights, dict):
        named = [(f"for output {name!r}", value) for name, value in weights.items()]
    else:
        flat = [] if weights is None else tf.nest.flatten(weights)
        named = [(f"for output {i}", value) for i, value in enumerate(flat)]
    named = [(where, value) for where, value in named if isinstance(value, (int, float))]
    return [f"{value} {where}" for where, value in named if not math.isfinite(value)]


def _of_one(evidence: Evidence) -> Iterator[Cause]:
    """Checks the loss of one output, or of all if the output is unknown."""
    first = evidence.first
    if first.frame.kind != "loss" or any(
        one.detail.summary.abs_max > SQUARED_IS_FINITE for one in evidence.predictions
    ):
        return
    if not all(one.is_finite for one in evidence.predictions):  # computed after the last layer
        return
    of_keras = keras_name(evidence)
    is_nan, named = bool(first.detail.summary.nan), f"{evidence.loss} {of_keras}".lower()
    squares = any(word in named for word in ("squared", "absolute", "huber", "cosh"))
    entropy = "crossentropy" in named
    bad = bad_rows(evidence)
    is_size = is_finite_for_small_labels(evidence)
    exponential, advice = overflowing_exponential(evidence, bad, squares)
    explained, of_numbers = ("", []) if exponential else equal_numbers(evidence, bad)
    if not (exponential or explained):
        explained, of_numbers = labels_of_zero(evidence, bad)
    if not (exponential or explained):
        explained, of_numbers = exponential_of_multiple(evidence, squares)
    exactly = reasons(evidence, bad) if bad.any() and not (exponential or explained) else []
    signs, advice, ends_reached = [], [*advice, *of_numbers], False
    if exponential or explained:
        signs.append(exponential or explained)
    elif exactly:
        where = f"its non-finite values are in {rows_text(bad)}"
        signs.append(f"{where}, and only there {' and '.join(exactly)}")
        advice.append("clip the argument of a logarithm or a root, and the divisor")
    elif bad.any() and not bad.all():
        signs.append(f"its non-finite values are only in {rows_text(bad)}")
    given = evidence.predictions
    is_own = not given
    if is_own:  # a custom training step usually computes its loss from all calls of the last layer
        last = evidence.outputs_before[-1:]
        given = [one for one in evidence.outputs_before if one.frame.name == last[0].frame.name]
    for one in given if not (exactly or exponential or explained) else ():
        what = f"'{one.frame.label}'" if is_own else "the predictions"
        low, high = value_range(one, bad)
        ends = [end for end, there in (("0", low == 0), ("1", high == 1)) if there]
        if ends and not squares:
            ends_reached = True
            signs.append(
                f"{what} reach{'es' * is_own} {' and '.join(ends)} exactly, where a logarithm is "
                "infinite"
            )
            if entropy:
                advice.append("give the loss logits (from_logits=True) instead of probabilities")
            advice.append("clip the argument of a logarithm (tf.clip_by_value(p, 1e-7, 1 - 1e-7))")
        elif low < 0 and is_nan and not (squares or is_size or "logits" in named):
            signs.append(
                f"{what} go{'es' * is_own} down to {low:.3g}, and a logarithm, a root or a "
                "fractional power of a negative number is NaN"
            )
            advice.append("clip the argument of a logarithm or a root")
    are_large = False
    for name, values in evidence.data.items():
        if not name.startswith("y") or not np.issubdtype(values.dtype, np.number):
            continue
        in_bad_rows = values[bad] if bad.any() else values
        is_unknown = labels_and_predictions(evidence) is None
        are_equal = is_nan and is_unknown and bool(equal_text("labels", values))
        if values.size and np.abs(in_bad_rows).max() > SQUARED_IS_FINITE:
            largest = np.abs(in_bad_rows).max()
            is_squared = "squared" in of_keras.lower()
            square = "whose square is infinite"
            if not is_squared:
                square = "and a square or a product of such a number may be infinite"
            signs.append(f"'{name}' reaches {largest:.3g}, {square}")
            advice.append("scale the labels")
            are_large = True
        elif not squares and _has_columns(values):
            if entropy or _may_be_classes(values, bad) or any(map(_has_distributions, given)):
                signs += _class_signs(name, values, bad)
        elif explained or are_equal:
            pass
        elif values.size and not values.any() and _may_be_any_row(bad):
            signs.append(f"all elements of '{name}' are 0")
        if are_equal:
            signs.append(
                f"all elements of '{name}' are equal ({float(values.flat[0]):.3g}), and a division "
                "of 0 by their deviation is 0/0"
            )
    if not is_nan and not signs:
        outputs = [one for one in evidence.of("output") if is_beyond_exp(one)]
        if outputs:
            least = min(outputs, key=lambda one: one.detail.high)
            signs.append(
                f"'{least.frame.label}' reaches {least.detail.high:.3g}, and an exponential of "
                f"more than {exp_limit(least):.3g} is infinite"
            )
            advice.append("clip the argument of an exponential")
    nothing = "in predictions and labels is unusual" if evidence.data else "is known of the labels"
    if explained or is_size:
        pass
    elif is_nan and not (squares or entropy or ends_reached or exponential):
        advice.append(
            "look for a logarithm of 0 or of a negative number, a mean over no elements, a "
            "division by a norm of 0, or an exponential that overflows, as with a small "
            "temperature: tf.reduce_logsumexp subtracts the maximum"
        )
    elif not (squares or advice):
        advice.append(
            "look for a logarithm of 0 in the loss, and for an exponential of a multiple of the "
            "predictions"
        )
    if not (of_keras or are_large or (advice and (ends_reached or exponential or explained))):
        advice.append("add a small number to the divisor")
    if is_own:
        yield _custom_loss_cause(evidence, is_nan, signs, advice)
        return
    names = " or ".join(repr(one) for one in dict.fromkeys(first.frame.source))
    name = f" {names}" * bool(names) + first.frame.of_outputs
    yield Cause(
        "the loss function",
        f"All outputs of the model are finite, but the loss{name} is "
        f"{'NaN' if is_nan else 'not'}: "
        f"{'; '.join(signs) or f'nothing {nothing}'}.",
        "; ".join(dict.fromkeys(advice or ["compare the labels with the predictions"])) + ".",
    )


def _may_be_any_row(bad: np.ndarray) -> bool:
    """Returns True if the loss of each row is not finite, or if the bad rows are not known."""
    return bool(bad.all()) or not bad.any()


def _has_columns(values: np.ndarray) -> bool:
    return values.ndim == 2 and values.shape[1] > 1


def _may_be_classes(values: np.ndarray, bad: np.ndarray) -> bool:
    """Returns True if labels are from 0 to 1, without those in known bad rows."""
    rest = values[~bad] if bad.any() and not bad.all() else values
    return bool(rest.size and rest.min() >= 0 and rest.max() <= 1)


def _has_distributions(predicted: Measurement) -> bool:
    """Returns True if the rows of a loss's input are probabilities, as a softmax makes them."""
    values = np.asarray(predicted.detail.values, float)
    if not _has_columns(values):
        return False
    return bool((values >= 0).all() and (np.abs(values.sum(1) - 1) < 1e-2).all())


def _class_signs(name: str, values: np.ndarray, bad: np.ndarray) -> Iterator[str]:
    """Yields unusual properties of one-hot labels as text.

    If the bad rows are known, properties count only if each of these rows has one, and no other row
    has it.
    """
    rows = bad if bad.any() else np.ones(len(values), bool)
    zero, sums = np.asarray(~values.any(1)), values.sum(1)
    unequal = np.asarray(np.abs(sums - 1) > 1e-3)
    improper: np.ndarray = (values < 0).any(1) | unequal
    is_partial = bad.any() and not (zero | improper)[bad].all()
    if is_partial:
        pass  # something else made the loss of some rows bad
    elif zero[rows].any() and not zero[~rows].any():
        yield f"all elements of '{name}' are 0 in {rows_text(zero)}"
    elif improper[rows].any() and not improper[~rows].any():
        why = "do not add up to 1" if unequal[rows].any() else "are not all at least 0"
        if rows.all():
            yield f"the rows of '{name}' are not distributions: their elements {why}"
        else:
            yield f"'{name}' is not a distribution in {rows_text(improper)}: its elements {why}"
    absent = np.flatnonzero(~values.any(0))
    if absent.size and _may_be_any_row(bad):
        yield f"class {', '.join(map(str, absent[:5]))} is absent from the batch"


def _custom_loss_cause(
    evidence: Evidence, is_nan: bool, signs: list[str], advice: list[str]
) -> Cause:
    """Returns the cause if a training step computes the loss without `compute_loss`."""
    where = "a custom train_step" if evidence.data else "the training loop"
    ranges = [
        f"'{one.frame.label}' {one.detail.low:.3g} to {one.detail.high:.3g}"
        for one in (*evidence.outputs_before[-3:], *evidence.of("data"))
        if one.frame.kind != "data" or one.frame.name.startswith("y")
    ]
    shown = f" Ranges: {', '.join(ranges)}." if ranges else ""
    seen = f" {'; '.join(signs)}." if signs else ""
    advice += [
        "compare these ranges with the formula of the loss",
        "tf.debugging.enable_check_numerics() names the operation (without jit_compile)",
    ]
    if evidence.data:
        advice.append("or compute the loss by self.compute_loss, so that each example is checked")
    return Cause(
        "the loss function",
        f"The outputs of layers are finite, but the loss is {'NaN' if is_nan else 'not'}. The loss "
        f"is computed in {where}, which this report does not examine.{shown}{seen}",
        "; ".join(dict.fromkeys(advice)) + ".",
    )
