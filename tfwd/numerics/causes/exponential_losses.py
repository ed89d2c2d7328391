"""Finds losses whose exponential of predictions, or of their differences from labels, overflows."""

from __future__ import annotations

import math

import numpy as np

from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.loss_rows import (
    differences,
    is_finite_if_clipped,
    labels_and_predictions,
    loss_with,
    value_range,
)
from tfwd.numerics.causes.overflow import exp_limit
from tfwd.numerics.tensor_measurements import rows_text

_CLIP = "or clip the argument of the exponential"
_OF_PREDICTIONS = [
    "subtract the maximum before an exponential, as tf.reduce_logsumexp does",
    "use a loss with from_logits=True, or tf.nn.softplus for log(1 + exp(z))",
    _CLIP,
]
_OF_DIFFERENCES = [
    "scale or clip the labels",
    "keras.losses.LogCosh is finite for all differences d: it is |d| + softplus(-2 |d|) - log(2)",
    _CLIP,
]


def overflowing_exponential(
    evidence: Evidence, bad: np.ndarray, squares: bool
) -> tuple[str, list[str]]:
    """Returns which exponential overflows, as text, and advice. Returns "" if none overflows.

    The predictions, their negatives, their sizes or their differences from the labels must be large
    in each bad row, and only there. The loss must be finite if they are clipped just below the
    limit of the exponential, and not finite if they are clipped just above.

    Args:
        evidence: The evidence, with one output.
        bad: Booleans along the batch, from `bad_rows`.
        squares: bool. True if the loss squares the predictions, which no exponential explains.
    """
    if not bad.any():
        return "", []
    (given,) = evidence.predictions
    rows = np.asarray(given.detail.values).reshape(len(bad), -1)
    limit = exp_limit(given)
    start = f"its non-finite values are in {rows_text(bad)}, "
    start += "where" if bad.all() else "and only there"
    arguments = (rows, -rows, np.abs(rows)) if rows.size and not squares else ()
    are_large = any(np.array_equal(one.max(1) > limit, bad) for one in arguments)
    if are_large and _begins_at(evidence, bad, limit, rows.shape[1], from_labels=False):
        low, high = value_range(given, bad)
        bound, what = f"above {limit:.3g}", "the exponential of z overflows"
        if high <= limit:
            bound = f"below -{limit:.3g}"
            what = "the exponential of z is 0, or the exponential of -z overflows"
        range_text = f"(from {low:.3g} to {high:.3g})"
        return f"{start} predictions z are {bound} {range_text}, and {what}", _OF_PREDICTIONS
    found = differences(evidence)
    if found is None or not np.array_equal(found > limit, bad):
        return "", []
    if not _begins_at(evidence, bad, limit, rows.shape[1], from_labels=True):
        return "", []
    return (
        f"{start} predictions and labels differ by more than {limit:.3g} (by "
        f"{found[bad].min():.3g} to {found[bad].max():.3g}), and the exponential of such a "
        "difference overflows",
        _OF_DIFFERENCES,
    )


def exponential_of_multiple(evidence: Evidence, squares: bool) -> tuple[str, list[str]]:
    """Returns that an exponential of a multiple of the predictions fits, and advice. Otherwise "".

    The predictions must be moderate and the loss +Inf. The loss must also be +Inf if all
    predictions are a tenth smaller, and finite if they are smaller by a larger factor. A logarithm
    of 0 or a division by 0 is infinite for single numbers only.

    Args:
        evidence: The evidence, with one output.
        squares: bool. True if the loss squares the predictions, which no exponential explains.
    """
    given, found = labels_and_predictions(evidence), evidence.first.detail.summary
    if squares or given is None or not found.positive_inf or found.nan:
        return "", []
    labels, predictions = given
    (measured,) = evidence.predictions
    if measured.detail.summary.abs_max > exp_limit(measured):
        return "", []
    if loss_with(evidence, labels, predictions * predictions.dtype.type(0.9)) != math.inf:
        return "", []
    for factor in (0.5**i for i in range(1, 11)):
        loss = loss_with(evidence, labels, predictions * predictions.dtype.type(factor))
        if loss is not None and math.isfinite(loss):
            low, high = measured.detail.low, measured.detail.high
            return (
                f"the predictions z are moderate (from {low:.3g} to {high:.3g}), and the loss is "
                f"finite for predictions of {factor:.3g} times this size; this fits an "
                "exponential of a multiple of z, as of z divided by a small temperature",
                ["multiply by a smaller number before an exponential", *_OF_PREDICTIONS],
            )
    return "", []


def _begins_at(
    evidence: Evidence, bad: np.ndarray, limit: float, columns: int, from_labels: bool
) -> bool:
    """Returns True if the loss of the bad rows becomes infinite at the limit of the exponential.

    Only an exponential of the numbers themselves, or its sum over the columns, does.
    """
    below = limit - math.log(columns) - 1
    return is_finite_if_clipped(evidence, bad, below, from_labels) and not is_finite_if_clipped(
        evidence, bad, limit + 1, from_labels
    )
