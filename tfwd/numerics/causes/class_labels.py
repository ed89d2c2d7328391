"""Unusual properties of labels of classes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tfwd.numerics.tensor_measurements import Measurement, rows_text


def may_be_any_row(bad: np.ndarray) -> bool:
    """Returns True if the loss of each row is not finite, or if the bad rows are not known."""
    return bool(bad.all()) or not bad.any()


def has_columns(values: np.ndarray) -> bool:
    """Returns True if each row of labels or predictions has several elements."""
    return values.ndim == 2 and values.shape[1] > 1


def may_be_classes(values: np.ndarray, bad: np.ndarray) -> bool:
    """Returns True if labels are 0 or 1, or add up to 1, without those in known bad rows."""
    rest = values[~bad] if bad.any() and not bad.all() else values
    are_binary = np.isin(rest, (0, 1)).all()
    are_shares = (rest >= 0).all() and (np.abs(rest.sum(1) - 1) < 1e-2).all()
    return bool(rest.size and (are_binary or are_shares))


def has_distributions(predicted: Measurement) -> bool:
    """Returns True if the rows of a loss's input are probabilities, as a softmax makes them."""
    values = np.asarray(predicted.detail.values, float)
    if not has_columns(values):
        return False
    return bool((values >= 0).all() and (np.abs(values.sum(1) - 1) < 1e-2).all())


def class_signs(name: str, values: np.ndarray, bad: np.ndarray) -> Iterator[str]:
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
    if absent.size and may_be_any_row(bad):
        yield f"class {', '.join(map(str, absent[:5]))} is absent from the batch"
