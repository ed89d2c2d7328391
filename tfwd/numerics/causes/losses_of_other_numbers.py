"""Computes a loss again with other labels or predictions, to find the numbers that explain it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from tfwd.finite import SQUARED_IS_FINITE
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.loss_rows import SMALL, is_nan, labels_and_predictions, loss_with
from tfwd.numerics.tensor_measurements import columns_text, rows_text

LEAST, MOST = 0.01, 0.1  # by these shares, numbers are made different
MOVED = (1 / 16, 1 / 32, 3 / 64)  # by one of these shares, equal numbers are made smaller


def equal_numbers(evidence: Evidence, bad: np.ndarray) -> tuple[str, list[str]]:
    """Returns which labels or predictions are equal, as text, and advice. Returns "" if none are.

    The loss must be finite if these numbers are different, and not finite if they have another
    common value. It then divides by their deviation, or by a number like this.

    Args:
        evidence: The evidence, with one output.
        bad: Booleans along the batch, from `bad_rows`.
    """
    given = labels_and_predictions(evidence)
    if given is None or not _is_bad(loss_with(evidence, *given)):
        return "", []
    equal = [_equal_text(*one, bad) for one in zip(("labels", "predictions"), given, strict=True)]
    for changes in ((True, False), (False, True), (True, True)):
        if not all(text for text, is_changed in zip(equal, changes, strict=True) if is_changed):
            continue
        pairs = list(zip(given, changes, strict=True))
        different = [_different(x) if is_changed else x for x, is_changed in pairs]
        moved = [
            [_moved(x, share) if is_changed else x for x, is_changed in pairs] for share in MOVED
        ]
        is_finite = _is_finite(loss_with(evidence, *different))
        if is_finite and any(_is_bad(loss_with(evidence, *others)) for others in moved):
            texts = [text for text, is_changed in zip(equal, changes, strict=True) if is_changed]
            quotient = (
                "a division of 0 by this deviation is 0/0"
                if is_nan(evidence)
                else "a division by this deviation is infinite"
            )
            names = "labels and predictions"
            if not all(changes):
                names = "labels" if changes[0] else "predictions"
            return (
                f"{' and '.join(texts)}, so their deviation is 0, and {quotient}; with different "
                f"{names}, the loss is finite",
                list(_advice(*changes)),
            )
    return "", []


def labels_of_zero(evidence: Evidence, bad: np.ndarray) -> tuple[str, list[str]]:
    """Returns how many labels are 0, as text, and advice, if zeros explain the loss. Otherwise "".

    The loss must be finite with a small number in place of each zero. It must not be finite if only
    one number of each class or example without a label is not 0: a sum of 0 is another cause.

    Args:
        evidence: The evidence, with one output.
        bad: Booleans along the batch, from `bad_rows`.
    """
    given = labels_and_predictions(evidence)
    if given is None or not given[0].size or given[0].dtype.kind not in "fiu":
        return "", []
    labels, predictions = given
    zeros = labels == 0
    some_rows = bad.any() and not bad.all()
    if some_rows and labels[0].size == 1:
        return "", []  # `reasons` compares the labels of the rows
    if not zeros.any() or not _is_bad(loss_with(evidence, labels, predictions)):
        return "", []
    small = np.where(zeros, SMALL, labels).astype(_floating(labels))
    some = np.where(_of_sums(zeros), SMALL, labels).astype(_floating(labels))
    if not _is_finite(loss_with(evidence, small, predictions)):
        return "", []
    if not _is_bad(loss_with(evidence, some, predictions)):
        return "", []
    what = "0 times log(0) is NaN, and 0/0 too"
    if not is_nan(evidence):
        what = "log(0) is infinite, and a division by 0 too"
    where = f"its non-finite values are in {rows_text(bad)}; " if some_rows else ""
    return (
        f"{where}{zeros.sum()} of {labels.size} labels are exactly 0, where {what}; with {SMALL} "
        "in place of 0, the loss is finite",
        [
            "clip the labels in the argument of a logarithm and in a divisor, as "
            "tf.clip_by_value(y, 1e-7, 1.0) does",
            "tf.math.xlogy(y, y) is y * log(y), and 0 for a label of 0",
        ],
    )


def is_finite_for_small_labels(evidence: Evidence) -> bool:
    """Returns True if labels that are too large make a loss bad: it is finite for small ones.

    Labels are too large if their square is infinite in float32. Small ones are at most 1.
    """
    given = labels_and_predictions(evidence)
    if given is None or not given[0].size or given[0].dtype.kind != "f":
        return False
    labels, predictions = given
    largest = np.abs(labels).max()
    if largest <= SQUARED_IS_FINITE or not _is_bad(loss_with(evidence, labels, predictions)):
        return False
    return _is_finite(loss_with(evidence, labels / largest, predictions))


def number_of_bad_predictions(evidence: Evidence) -> int:
    """Returns how many other predictions were tried if none gives a finite loss; otherwise 0.

    The labels then make the loss bad, or numbers of the loss itself.
    """
    given = _bad_predictions(evidence)
    if given is None:
        return 0
    labels, predictions = given
    shape = predictions.shape
    tried = [np.full(shape, value) for value in (0.0, 0.5, -0.5, 2.0, 20.0)]
    for low, high in ((LEAST, MOST), (1.5, 20.0)):
        ramp = np.linspace(low, high, predictions.size).reshape(shape)
        tried += [ramp, -ramp]
    if labels.shape == shape and labels.dtype.kind in "fiu":
        tried += [labels, labels + 1.0, labels * 5.0]
    losses = (loss_with(evidence, labels, one.astype(predictions.dtype)) for one in tried)
    return len(tried) if all(map(_is_bad, losses)) else 0


def may_be_of_ends(evidence: Evidence) -> bool:
    """Returns False if a loss is also bad for predictions that are not exactly 0 or 1."""
    given = _bad_predictions(evidence)
    if given is None:
        return True
    labels, predictions = given
    inside = np.where(predictions == 0, SMALL, predictions)
    inside = np.where(predictions == 1, 1 - SMALL, inside).astype(predictions.dtype)
    return not _is_bad(loss_with(evidence, labels, inside))


def may_need_positive(evidence: Evidence) -> bool:
    """Returns False if a loss is also bad for the absolute values of its predictions."""
    given = _bad_predictions(evidence)
    if given is None:
        return True
    labels, predictions = given
    positive = np.maximum(np.abs(predictions), predictions.dtype.type(SMALL))
    return not _is_bad(loss_with(evidence, labels, positive))


def scaled_down(evidence: Evidence) -> float:
    """Returns the largest prediction if smaller ones give a finite loss; otherwise 0.

    The smaller ones are the predictions times a number, and are at most 1/2. The largest must be
    above 10.
    """
    given = _bad_predictions(evidence)
    if given is None:
        return 0.0
    labels, predictions = given
    largest = float(np.abs(predictions).max())
    if largest <= 10:
        return 0.0
    smaller = (predictions * (0.5 / largest)).astype(predictions.dtype)
    return largest if _is_finite(loss_with(evidence, labels, smaller)) else 0.0


def _bad_predictions(evidence: Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the labels and the floating predictions of a loss that is not finite; else None."""
    given = labels_and_predictions(evidence)
    if given is None or not given[1].size or given[1].dtype.kind != "f":
        return None
    return given if _is_bad(loss_with(evidence, *given)) else None


def _of_sums(zeros: np.ndarray) -> np.ndarray:
    """Returns one position in each row and column of zeros, if an example has several labels."""
    chosen = np.zeros(zeros.shape, bool)
    if zeros.ndim != 2 or zeros.shape[1] == 1:
        chosen.flat[0] = zeros.all()
        return chosen
    chosen[:, 0] |= zeros.all(1)
    chosen[0] |= zeros.all(0)
    return chosen


def _advice(labels: bool, predictions: bool) -> Iterator[str]:
    yield "add a small number to the divisor (a deviation, a variance or a norm)"
    if labels:
        yield "leave out batches whose labels are all equal, or use larger batches"
    if predictions:
        yield "look for a layer that makes all predictions equal, such as a dead relu"


def equal_text(what: str, values: np.ndarray) -> str:
    """Returns that all numbers of a batch are equal, as text; "" if they differ."""
    if values.size < 2 or values.dtype.kind not in "fiub" or (values != values.flat[0]).any():
        return ""
    return f"all {what} of the batch are equal ({float(values.flat[0]):.3g})"


def _equal_text(what: str, values: np.ndarray, bad: np.ndarray) -> str:
    """Returns which numbers are equal: all, those of a column, or those of a row."""
    everywhere = equal_text(what, values)
    if everywhere or values.ndim != 2 or values.dtype.kind not in "fiub":
        return everywhere
    rows, columns = (values == values[:, :1]).all(1), (values == values[:1]).all(0)
    if values.shape[1] > 1 and rows.any() and (bad.all() or np.array_equal(rows, bad)):
        return f"all {what} of an example are equal in {rows_text(rows)}"
    if len(values) > 1 and columns.any() and (bad.all() or not bad.any()):
        return f"the {what} are the same for all examples in {columns_text(columns)}"
    return ""


def _different(values: np.ndarray) -> np.ndarray:
    """Returns numbers of similar size that all differ."""
    return _smaller(values, np.linspace(LEAST, MOST, values.size).reshape(values.shape))


def _moved(values: np.ndarray, share: float) -> np.ndarray:
    """Returns numbers of similar size that are equal where the given numbers are equal."""
    return _smaller(values, np.full(values.shape, share))


def _smaller(values: np.ndarray, shares: np.ndarray) -> np.ndarray:
    return np.where(values == 0, shares, values * (1 - shares)).astype(_floating(values))


def _floating(values: np.ndarray) -> np.dtype:
    return values.dtype if values.dtype.kind == "f" else np.dtype("float32")


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _is_bad(loss: float | None) -> bool:
    return loss is not None and not math.isfinite(loss)
