"""Rule for a softmax whose inputs are all -infinity, for example from a mask over all keys."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np

from tfwd import _keras
from tfwd.finite import SQUARED_IS_FINITE
from tfwd.numerics.bad_step_report import Cause
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.layers import NORMALIZING
from tfwd.numerics.tensor_measurements import Measurement, rows_text

NAMES = ("softmax", "attention", "attend")
MASKS = (*NAMES, "mask")
LEAST_WIDTH = 4  # a shorter vector may be all NaN by chance


def all_masked(evidence: Evidence) -> Iterator[Cause]:
    """Checks for a softmax whose inputs are all -infinity, or for a mask of -infinity."""
    first = evidence.first
    if first.frame.kind not in ("input", "output", "pre-activation"):
        return
    if first.frame.layer in NORMALIZING:
        return
    found = first.detail.summary
    if found.negative_inf and found.negative_inf == found.non_finite:
        given = evidence.before
        if given is not None and not _is(first, MASKS):
            zeros = given.detail.summary.zeros
            if given.detail.summary.size == found.size and zeros == found.negative_inf:
                return  # it is the logarithm of 0
        after = [one for one in evidence.bad("output") if one.detail.summary.nan]
        # All inputs of a softmax are -infinity in some vector, and NaN follows.
        all_inputs = bool(after) and first.detail.vectors.any()
        all_inputs = all_inputs and _may_have_softmax(evidence, after[0])
        if not (_is(first, MASKS) or (after and _is(after[0], NAMES)) or all_inputs):
            return
        then = f" NaN follows in '{after[0].frame.label}'." if after else ""
        yield Cause(
            "a softmax whose inputs are all -infinity",
            f"'{first.frame.name}' sets {found.negative_inf} elements to -infinity, as a mask does."
            f"{then} A softmax is NaN if all its inputs are -infinity.",
            "check that the mask leaves at least one key for each query, and has the right sign "
            "(True where a key is kept); or mask by a large negative number, -1e9 (in float16 "
            "-6e4), instead of -infinity. If only some inputs of each softmax are -infinity, "
            f"this is fine: ignore the layer with FiniteCheck(exclude={first.frame.name!r}).",
        )
        return
    if not found.nan or found.nan != found.non_finite:
        return
    vectors = first.detail.vectors
    are_whole = not vectors.size or vectors.any()  # a softmax makes all its results NaN
    may_be = are_whole and _may_have_softmax(evidence, first)
    masked = [*_masked_rows(evidence, first)] if may_be else []
    queries = "" if masked else single_queries(evidence, first)
    if not masked and not queries and not _may_be_softmax(evidence, first):
        return
    if queries:
        seen = queries
    elif masked:
        seen = (
            f"'{first.frame.name}' is NaN in {rows_text(first.detail.rows)}, and only there "
            f"{' and '.join(masked)}. If this value is padding, no key is left."
        )
    elif first.detail.steps.any() and not first.detail.steps.all():
        steps = ", ".join(str(i) for i in np.flatnonzero(first.detail.steps)[:5])
        seen = f"'{first.frame.name}' is NaN only at time step {steps}: a mask may leave no key."
    else:
        seen = f"'{first.frame.name}' makes NaN from finite numbers."
    yield Cause(
        "a softmax whose inputs are all -infinity",
        f"{seen} A softmax is 0/0 if all its inputs are -infinity.",
        "check that the mask leaves at least one key for each query (for an example that is all "
        "padding, keep one, or remove the example), and has the right sign (True where a key "
        "is kept); or mask by a large negative number, -1e9 (in float16 -6e4), instead of "
        "-infinity. If there is no softmax, look for a division by a sum that is 0.",
    )


def _may_be_softmax(evidence: Evidence, first: Measurement) -> bool:
    """Returns True if the name says that a layer with NaN has a softmax, and nothing overflows."""
    layer = evidence.layer(first.frame.name)
    is_known = layer is None or _keras.is_of_keras(type(layer)) or _is_of_tfwd(type(layer))
    is_known |= _is(first, ("softmax",))
    at = evidence.found.index(first)
    large = any(one.detail.summary.abs_max > SQUARED_IS_FINITE for one in evidence.found[:at])
    return first.frame.kind != "input" and is_known and not large and _is(first, NAMES)


def _may_have_softmax(evidence: Evidence, found: Measurement) -> bool:
    """Returns False for the output of a layer if no code in it names a softmax."""
    layer = evidence.layer(found.frame.name)
    if layer is None or _is(found, NAMES):
        return True
    names = set[str]()
    for each in _keras.layers.all_layers(layer):
        if isinstance(each, keras.Model) and not isinstance(each, keras.Sequential):
            return True  # it may contain operations that are no layers
        names |= _keras.names_in_code(each)
        if _keras.is_of_keras(type(each)):
            activation = getattr(getattr(each, "activation", None), "__name__", "")
            names |= {type(each).__name__.lower(), each.name.lower(), activation.lower()}
    return any(word in name for name in names for word in ("softmax", "exp", "attention"))


def _is_of_tfwd(cls: type) -> bool:
    return cls.__module__.startswith("tfwd.")


def single_queries(evidence: Evidence, first: Measurement) -> str:
    """Returns a sentence if an example has both vectors that are all NaN and other vectors.

    A mask that leaves no key for a query has this effect. An elementwise function would leave some
    elements of the vector finite.
    """
    vectors, before = first.detail.vectors, evidence.before
    if vectors.ndim < 2 or first.detail.width < LEAST_WIDTH or first.frame.recurrent:
        return ""
    inner = tuple(range(1, vectors.ndim))
    if not (vectors.any(inner) & ~vectors.all(inner)).any():
        return ""
    constant = np.zeros(0, bool)
    if before is not None:
        constant = before.detail.lows == before.detail.highs
    if constant.shape == vectors.shape and constant[vectors].all():  # a norm or a deviation of 0
        return ""
    queries = vectors.any(tuple(range(1, vectors.ndim - 1)))
    places = [f"query {query} of row {row}" for row, query in np.argwhere(queries)]
    more = f" and {len(places) - 3} others" if len(places) > 3 else ""
    masks = [
        f"'{name}'"
        for name, values in evidence.data.items()
        if evidence.reaches(name) and _masks(name, values, queries)
    ]
    return (
        f"'{first.frame.name}' is NaN in whole vectors at {', '.join(places[:3])}{more}, and "
        "finite elsewhere. Attention has such outputs at queries for which a mask leaves no key."
        + (f" Only there, {' and '.join(masks)} leaves no key." if masks else "")
    )


def _masks(name: str, values: np.ndarray, there: np.ndarray) -> bool:
    """Returns True if an input is a mask of queries by keys, constant only at these queries."""
    if not name.startswith("x") or values.ndim < 3 or not np.isin(values, (0, 1)).all():
        return False
    same = (values == values[..., :1]).all(-1).any(tuple(range(1, values.ndim - 2)))
    return same.shape == there.shape and bool((same == there).all())


def _is(found: Measurement, words: tuple[str, ...]) -> bool:
    named = f"{found.frame.layer} {found.frame.name.rpartition('/')[2]}".lower()
    return any(word in named for word in words)


def _masked_rows(evidence: Evidence, first: Measurement) -> Iterator[str]:
    """Yields inputs that are constant in the examples with NaN, and only there, as text."""
    rows = first.detail.rows
    for name, values in evidence.data.items():
        counted = values.dtype == bool or np.issubdtype(values.dtype, np.integer)
        if not name.startswith("x") or not evidence.reaches(name):
            continue
        if values.ndim < 2 or rows.shape != values.shape[:1]:
            continue
        flat = values.reshape(len(values), -1)
        if flat.shape[1] < 2 or not rows.any() or not (counted or np.isin(flat, (0, 1)).all()):
            continue
        value = flat[rows][0, 0]
        same = (flat == value).all(1)
        is_mask = counted or _is(first, MASKS) or "mask" in name.lower()
        if rows.all() and (value or not is_mask):  # nothing to compare with
            continue
        if same[rows].all() and not same[~rows].any():
            yield f"all elements of '{name}' are {value.item()}"
