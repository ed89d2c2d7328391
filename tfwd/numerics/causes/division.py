"""Rule for a bad step in which a function of zeros, or of equal numbers, is NaN."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tfwd import _keras
from tfwd.numerics.bad_step_report import Cause
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.layers import NORMALIZING
from tfwd.numerics.causes.loss_rows import bad_rows
from tfwd.numerics.causes.overflow import exp_limit
from tfwd.numerics.causes.softmax import all_masked
from tfwd.numerics.tensor_measurements import Measurement, columns_text, whole_columns

# Keras's layers that divide by a number that is 0 for such inputs.
DIVIDING = (*NORMALIZING, "RMSNormalization", "GlobalAveragePooling1D")


def zero_by_zero(evidence: Evidence) -> Iterator[Cause]:
    """Checks for NaN from zeros or equal numbers, as in 0/0.

    Only Keras's own layers have a known formula. A custom layer may also compute another function.
    """
    is_loss = evidence.first.frame.kind == "loss"
    is_weighted = is_loss and not evidence.parts and not bad_rows(evidence).any()
    for name, values in evidence.data.items():
        if name.startswith("sample_weight") and is_weighted and values.size and not values.any():
            yield Cause(
                "a division of 0 by 0",
                f"'{name}' is 0 for all {len(values)} examples of the batch.",
                "skip such batches, or divide by a number that is at least 1.",
            )
    before, first = evidence.before, evidence.first
    if before is None or first.frame.kind not in ("input", "output", "pre-activation"):
        return
    summary, found, takes = before.detail.summary, first.detail.summary, _may_take(evidence, before)
    is_everywhere = not first.detail.rows.any() or first.detail.rows.all()
    are_zeros = summary.size and summary.zeros == summary.size
    if are_zeros and is_everywhere and found.nan and takes:
        yield _cause(
            evidence,
            f"All {summary.size} elements of '{before.frame.label}' are 0, and the result of the "
            "next computation is NaN",
            "look for a mask or a dropout rate that removes everything, and for a mean or a norm "
            "of zeros; add a small number to the divisor",
        )
        return
    if found.nan != found.non_finite or first.frame.layer in NORMALIZING:
        return
    if first.frame.recurrent and not first.detail.steps[:1].any():
        return  # it is finite at the first time step
    if takes and (in_columns := _seen_in_columns(before, first)):
        columns = first.detail.columns
        yield _cause(
            evidence,
            f"'{first.frame.label}' is NaN in {columns_text(columns)}"
            f"{_there(columns)} {in_columns}",
            "add a small number to the divisor (a sum, norm or deviation over the batch), and look "
            "for columns that are the same for all examples",
        )
        return
    seen = list(_seen_in_rows(before, first)) if takes else []
    seen += _seen_in_data(evidence, first)
    if seen and not any(True for _ in all_masked(evidence)):
        yield _cause(
            evidence,
            f"'{first.frame.label}' is NaN in {evidence.rows_text(first)}"
            f"{_there(first.detail.rows)} {' and '.join(seen)}",
            "check that a mask does not remove everything (a softmax whose inputs are all "
            "-infinity is NaN too); otherwise add a small number to the divisor (a sum, norm or "
            "deviation), or remove these examples",
        )


def _cause(evidence: Evidence, seen: str, advice: str) -> Cause:
    """Returns 0/0 as the cause, or as one of several possible causes in a custom function."""
    first = evidence.first.frame
    layer = evidence.layer(first.name)
    if first.kind != "input" and first.layer in DIVIDING and _keras.is_of_keras(type(layer)):
        return Cause("a division of 0 by 0", f"{seen}: 0/0.", f"{advice}.")
    return Cause(
        "0/0 or a function outside its domain",
        f"{seen}. This fits 0/0. It also fits 0 times infinity, an arccosine beyond 1, and a root "
        "or a logarithm of a negative number.",
        f"{advice}. If the code does not divide, clip the argument of its root, logarithm or "
        "arccosine.",
    )


def _there(bad: np.ndarray) -> str:
    return ", where" if bad.all() else ", and only there"


def _may_take(evidence: Evidence, before: Measurement) -> bool:
    """Returns False if it is known that the first non-finite layer takes other tensors only."""
    if not evidence.may_take([before]):
        return False
    if evidence.calls > 1 and not any(one is before for one in evidence.inputs_of_call):
        return False  # another call may take it
    name = evidence.first.frame.name
    takers = [x.frame for x in evidence.of("gradient") if name in x.frame.source]
    return not takers or before.frame.name in {frame.name for frame in takers}


def _seen_in_rows(before: Measurement, first: Measurement) -> Iterator[str]:
    """Yields special properties of a layer's input, in the rows where the layer makes NaN."""
    vectors, lows, highs = first.detail.vectors, before.detail.lows, before.detail.highs
    limit = exp_limit(first)
    if vectors.ndim > 1 and vectors.any() and vectors.shape == lows.shape:
        inner = tuple(range(1, vectors.ndim))
        partly = (vectors.any(inner) & ~vectors.all(inner)).any()
        if partly and before.detail.width > 1 and _is_deviation(lows, highs, vectors, limit):
            yield f"'{before.frame.label}' is constant within each vector that becomes NaN"
            return
    rows = first.detail.rows
    if not rows.any() or rows.shape != lows.shape[:1] or before.frame.kind == "data":
        return
    if not _has_whole_vectors(first):
        return
    lows, highs = lows.reshape(len(rows), -1).min(1), highs.reshape(len(rows), -1).max(1)
    if _only_in((lows == 0) & (highs == 0), rows):
        yield f"all elements of '{before.frame.label}' are 0, so its norm and its sum are 0"
    elif before.detail.width > 1 and _is_deviation(lows, highs, rows, limit):
        yield f"'{before.frame.label}' is constant, so its deviation is 0"


def _seen_in_columns(before: Measurement, first: Measurement) -> str:
    """Returns the special property of a layer's input in the columns that become NaN, or ""."""
    bad = whole_columns(first.detail)
    lows, highs = before.detail.column_lows, before.detail.column_highs
    if before.detail.lows.size < 2 or not bad.any() or bad.shape != lows.shape:
        return ""
    if (lows[bad] < 0).any():
        return ""  # a root or a logarithm of these numbers is NaN too
    if not _is_deviation(lows, highs, bad, exp_limit(first)):
        return ""
    if (lows[bad] == 0).all():
        return f"'{before.frame.label}' is 0 everywhere, so its deviation, norm and sum are 0"
    return f"'{before.frame.label}' is the same for all examples, so its deviation is 0"


def _has_whole_vectors(first: Measurement) -> bool:
    """Returns True if some vector is all NaN in each example with NaN.

    If an example is divided by its own sum, norm or deviation of 0, whole vectors are NaN.
    """
    vectors, rows = first.detail.vectors, first.detail.rows
    if not vectors.size or vectors.shape[:1] != rows.shape:
        return True  # it is not known
    return bool(vectors.reshape(len(rows), -1).any(1)[rows].all())


def _is_deviation(lows: np.ndarray, highs: np.ndarray, bad: np.ndarray, limit: float) -> bool:
    """Returns True if vectors are constant exactly where a tensor is NaN.

    It returns False if the size of their elements explains NaN too. For example, a root of negative
    numbers is NaN, and so are an arccosine beyond 1 and a quotient of infinite exponentials.

    Args:
        lows: Smallest element of each vector.
        highs: Largest element of each vector.
        bad: Booleans. True for a vector where the tensor is NaN.
        limit: The exponential of a larger number is infinite.
    """
    if not _only_in(lows == highs, bad):
        return False
    least, most = (0, limit) if bad.all() else (lows[~bad].min(), highs[~bad].max())
    return not ((highs[bad] < least) | (lows[bad] > most)).all()


def _only_in(holds: np.ndarray, bad: np.ndarray) -> bool:
    """Returns True if a property holds wherever a tensor is NaN, and nowhere else."""
    return bool(holds[bad].all() and not holds[~bad].any())


def _seen_in_data(evidence: Evidence, first: Measurement) -> Iterator[str]:
    """Yields the tensor's inputs that are constant in each row where the tensor is not finite."""
    rows = first.detail.rows
    for name, values in evidence.data.items() if _has_whole_vectors(first) else ():
        if not name.startswith("x") or not evidence.reaches(name):
            continue
        if not np.issubdtype(values.dtype, np.number):
            continue
        if values.ndim > 1 and values[0].size > 1 and rows.shape == values.shape[:1]:
            flat = values.reshape(len(values), -1)
            if not rows.any():
                continue
            if _only_in((flat == 0).all(1), rows):
                yield f"all elements of '{name}' are 0"
            elif _is_deviation(flat.min(1), flat.max(1), rows, exp_limit(first)):
                yield f"'{name}' is constant, so its deviation is 0"
