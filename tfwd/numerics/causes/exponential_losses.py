"""Finds losses whose exponential of predictions, or of their differences from labels, overflows."""

from __future__ import annotations

import math

import numpy as np

from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.loss_rows import differences, is_finite_if_clipped, value_range
from tfwd.numerics.causes.overflow import exp_limit
from tfwd.numerics.tensor_measurements import rows_text


def sign_of_predictions(evidence: Evidence, bad: np.ndarray) -> str:
    """Returns that an exponential of the predictions overflows, as text. Returns "" if it does not.

    The predictions, their negatives or their sizes must be large in each bad row, and only there.
    The loss must be finite if they are clipped just below the limit of the exponential, and not
    finite if they are clipped just above.
    """
    if not bad.any():
        return ""
    (given,) = evidence.predictions
    rows = np.asarray(given.detail.values).reshape(len(bad), -1)
    limit = exp_limit(given)
    arguments = (rows, -rows, np.abs(rows)) if rows.size else ()
    if not any(np.array_equal(one.max(1) > limit, bad) for one in arguments):
        return ""
    # Only an exponential of the predictions themselves, or their sum, becomes infinite just here.
    below = limit - math.log(rows.shape[1]) - 1
    if not is_finite_if_clipped(evidence, bad, below):
        return ""
    if is_finite_if_clipped(evidence, bad, limit + 1):
        return ""
    low, high = value_range(given, bad)
    if high > limit:
        bound, what = f"above {limit:.3g}", "the exponential of z overflows"
    else:
        bound = f"below -{limit:.3g}"
        what = "the exponential of z is 0, or the exponential of -z overflows"
    return (
        f"its non-finite values are in {rows_text(bad)}, {_where(bad)} predictions z are {bound} "
        f"(from {low:.3g} to {high:.3g}), and {what}"
    )


def sign_of_differences(evidence: Evidence, bad: np.ndarray) -> str:
    """Returns that an exponential of predictions minus labels overflows, as text; "" otherwise."""
    found = differences(evidence) if bad.any() else None
    if found is None or len(found) != len(bad):
        return ""
    limit = exp_limit(evidence.predictions[0])
    if not np.array_equal(found > limit, bad):
        return ""
    columns = np.asarray(evidence.predictions[0].detail.values)[0].size
    if not is_finite_if_clipped(evidence, bad, limit - math.log(columns) - 1, from_labels=True):
        return ""
    if is_finite_if_clipped(evidence, bad, limit + 1, from_labels=True):
        return ""
    return (
        f"its non-finite values are in {rows_text(bad)}, {_where(bad)} predictions and labels "
        f"differ by more than {limit:.3g} (by {found[bad].min():.3g} to {found[bad].max():.3g}), "
        "and the exponential of such a difference overflows"
    )


def _where(bad: np.ndarray) -> str:
    return "where" if bad.all() else "and only there"
