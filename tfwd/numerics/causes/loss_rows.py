"""Finds the examples of a batch whose loss is not finite: computes the loss of each example."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfwd._keras import losses as _keras_losses
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.losses_by_output import of_output, outputs
from tfwd.numerics.tensor_measurements import Measurement

SMALL = 0.001  # in place of numbers that are 0
UNKNOWN = np.zeros(0, bool)
MOST = 512  # largest number of examples: each takes about a millisecond


def bad_rows(evidence: Evidence) -> np.ndarray:
    """Finds the examples whose loss is not finite.

    Returns:
        Booleans along the batch. Empty if the losses are unknown. Examples are several outputs, a
        large batch, a custom loss that needs more than two examples, and a loss with random
        numbers.
    """
    given = _given(evidence)
    if given is None or len(given[2]) > MOST:
        return UNKNOWN
    loss, labels, predictions = given

    def loss_of(rows: np.ndarray) -> float:
        return _loss(loss, labels[rows], predictions[rows])

    try:
        return _bad_rows(loss_of, np.arange(len(predictions)))
    except Exception:  # a custom loss may need more examples
        return UNKNOWN


def _bad_rows(loss_of: Callable[[np.ndarray], float], numbers: np.ndarray) -> np.ndarray:
    """Finds the bad rows of these numbers by the losses of some rows alone."""

    def is_bad(rows: np.ndarray) -> bool:
        return not math.isfinite(loss_of(rows))

    def bad_beside(good: np.ndarray) -> np.ndarray:
        beside = [i not in good and is_bad(np.sort(np.append(good, i))) for i in numbers]
        return np.array(beside, bool)

    def is_random(groups: list[np.ndarray]) -> bool:
        return any(not _is_close(loss_of(rows), loss_of(rows)) for rows in groups)

    bad = np.array([is_bad(numbers[[i]]) for i in numbers])
    if not bad.any():
        return bad
    if bad.all():  # a loss may need a deviation, which is 0 for a single example
        pairs = (numbers[i : i + 2] for i in numbers[:-1])
        good = next((pair for pair in pairs if not is_bad(pair)), None)
        if good is None:
            return bad
        if is_random([good]):
            return UNKNOWN
        beside = bad_beside(good)
        return bad if is_bad(numbers[~beside]) else beside
    good = numbers[~bad]
    if is_random([good[[i]] for i in range(min(4, len(good)))]):
        return UNKNOWN
    if is_bad(good):
        return bad
    # A mean over labels that are not masked is 0/0 for one masked label, but not beside others.
    beside = bad_beside(good)
    return beside if beside.any() else bad


def _is_close(loss: float, other: float) -> bool:
    return math.isfinite(loss) and math.isclose(loss, other, rel_tol=1e-3, abs_tol=1e-9)


def is_bad(evidence: Evidence) -> bool:
    """Returns True if the loss of one output is not finite for the whole batch, without weights."""
    try:
        loss = batch_loss(evidence)
    except Exception:  # a custom loss may need what compile gives it
        return bool(bad_rows(evidence).any())
    return loss is not None and not math.isfinite(loss)


def _is_bad_with_weights(evidence: Evidence) -> bool:
    """Returns True if the loss of one output is not finite with its weights."""
    try:
        loss = batch_loss(evidence, sample_weights(evidence), evidence.loss_weight)
    except Exception:  # a custom loss may need what compile gives it
        return False
    return loss is not None and not math.isfinite(loss)


def is_nan(evidence: Evidence) -> bool:
    """Returns True if the loss of one output is NaN, without sample weights if it is not finite.

    The total of an infinite loss may be NaN: by a sample weight of 0, or by another output.
    """
    try:
        found = batch_loss(evidence), batch_loss(evidence, sample_weights(evidence))
    except Exception:  # a custom loss may need what compile gives it
        found = None, None
    bad = [loss for loss in found if loss is not None and not math.isfinite(loss)]
    return math.isnan(bad[0]) if bad else bool(evidence.first.detail.summary.nan)


def batch_loss(
    evidence: Evidence, weights: np.ndarray | None = None, factor: float = 1.0
) -> float | None:
    """Returns the loss of one output for the whole batch; None if the loss is unknown.

    Args:
        evidence: The evidence, with one output.
        weights: The sample weights. Default None, no weights.
        factor: float. The number in `loss_weights`. Default 1.
    """
    given = _given(evidence)
    return None if given is None else _loss(*given, weights, factor)


def labels_and_predictions(evidence: Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the labels and the predictions of one output; None if its loss is unknown."""
    given = _given(evidence)
    return None if given is None else given[1:]


def loss_with(evidence: Evidence, labels: np.ndarray, predictions: np.ndarray) -> float | None:
    """Returns the loss of one output for other numbers; None if the loss refuses them."""
    given = _given(evidence)
    try:
        return None if given is None else _loss(given[0], labels, predictions)
    except Exception:  # a custom loss may need what compile gives it
        return None


def sample_weights(evidence: Evidence) -> np.ndarray | None:
    """Returns the sample weights of one output; None without sample weights."""
    found = [values for name, values in evidence.data.items() if name.startswith("sample_weight")]
    return found[0] if len(found) == 1 else None


def _given(evidence: Evidence) -> tuple[Any, np.ndarray, np.ndarray] | None:
    """Returns the loss of one output with its labels and predictions. None if they are unknown."""
    loss = evidence.function
    if loss is None:
        loss = _keras_losses.compiled_loss(evidence.model)[0]
    labels = [values for name, values in evidence.data.items() if name.startswith("y")]
    if loss is None or len(labels) != 1 or len(evidence.predictions) != 1:
        return None
    losses = tf.nest.flatten(loss)
    predictions = np.asarray(evidence.predictions[0].detail.values)
    if len(losses) != 1 or not predictions.shape or predictions.shape[:1] != labels[0].shape[:1]:
        return None
    return losses[0], labels[0], predictions


def is_finite_if_clipped(
    evidence: Evidence, bad: np.ndarray, limit: float, from_labels: bool = False
) -> bool:
    """Returns True if the loss of the bad rows is finite for predictions of at most this size.

    `bad` must come from `bad_rows`, with at least one True. With `from_labels`, the limit is for
    the differences from the labels.
    """
    given = _given(evidence)
    if given is None:
        return False
    loss, labels, predictions = given
    middle = labels[bad] if from_labels else 0
    clipped = np.clip(predictions[bad], middle - limit, middle + limit, dtype=predictions.dtype)
    try:
        return math.isfinite(_loss(loss, labels[bad], clipped))
    except Exception:  # a custom loss may need all rows
        return False


def differences(evidence: Evidence) -> np.ndarray | None:
    """Returns the largest difference of prediction and label in each row; None if unknown."""
    given = _given(evidence)
    if given is None or given[1].shape != given[2].shape or given[1].dtype.kind != "f":
        return None
    _, labels, predictions = given
    return np.abs(predictions - labels).reshape(len(labels), -1).max(1, initial=0)


def _loss(
    loss: Any,
    label: np.ndarray,
    prediction: np.ndarray,
    weights: np.ndarray | None = None,
    factor: float = 1.0,
) -> float:
    given = [tf.constant(one) for one in (label, prediction, weights) if one is not None]
    return float(_keras_losses.loss_object(loss)(*given) * factor)


def value_range(found: Measurement, bad: np.ndarray) -> tuple[float, float]:
    """Returns the smallest and the largest element of a prediction, in bad rows if known."""
    if not bad.any():
        return found.detail.low, found.detail.high
    values = np.asarray(found.detail.values)[bad]
    return float(values.min()), float(values.max())


def reasons(evidence: Evidence, bad: np.ndarray) -> list[str]:
    """Returns properties of predictions and labels in these examples only, as text.

    `bad` must come from `bad_rows`, with at least one True. The loss must be finite with other
    numbers in place of those that have these properties.
    """
    (labels,) = [values for name, values in evidence.data.items() if name.startswith("y")]
    given = {"prediction": np.asarray(evidence.predictions[0].detail.values), "label": labels}
    are_zero = [(values.reshape(len(bad), -1) == 0).all(1) for values in given.values()]
    is_wide = any(values[0].size > 1 for values in given.values())
    if is_wide and np.array_equal(np.logical_and(*are_zero), bad):  # a quotient of their sums
        return ["all labels and all predictions are 0"]
    found = []
    changed = {name: np.array(values) for name, values in given.items()}
    for name, values in given.items():
        rows = values.reshape(len(bad), -1)
        if rows.shape[1] > 64 or not np.issubdtype(rows.dtype, np.number):
            continue
        properties = [("is 0", rows == 0)]
        if not bad.all():  # otherwise all numbers of a column may be negative by chance
            properties.append(("is negative", rows < 0))
        for what, holds in properties:
            for column in np.flatnonzero(holds[bad].all(0) & ~holds[~bad].any(0)):
                single = name == "label" and rows.shape[1] == 1
                where = "the label" if single else f"column {column} of the {name}s"
                found.append(f"{where} {what}")
                others = changed[name].reshape(len(bad), -1)
                small = 1 if others.dtype.kind in "iu" else SMALL
                others[bad, column] = small if what == "is 0" else np.abs(others[bad, column])
    loss = loss_with(evidence, changed["label"], changed["prediction"]) if found else None
    return [] if loss is not None and not math.isfinite(loss) else found


def parts(evidence: Evidence) -> list[Evidence]:
    """Returns the evidence of each output whose loss is not finite, with or without weights."""
    if len(evidence.predictions) < 2:
        return []
    found = [of_output(evidence, output) for output in outputs(evidence)]
    return [part for part in found if is_bad(part) or _is_bad_with_weights(part)]
