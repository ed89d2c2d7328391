"""Finds sample weights and loss_weights that are too large: the loss is finite without them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from tfwd.numerics.bad_step_report import Cause
from tfwd.numerics.causes.class_weights import weighted_classes
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.loss_rows import batch_loss, sample_weights
from tfwd.numerics.causes.losses_by_output import of_single_output
from tfwd.numerics.tensor_measurements import rows_text

SMALLER = "for example, divide them by their mean"


def large_weights(evidence: Evidence) -> Iterator[Cause]:
    """Checks for weights that make the loss of one output infinite."""
    part = of_single_output(evidence)
    if part is None or evidence.first.frame.kind != "loss":
        return
    weights, factor = sample_weights(part), part.loss_weight
    try:
        own, in_fit = batch_loss(part), batch_loss(part, weights, factor)
        with_factor, with_samples = batch_loss(part, None, factor), batch_loss(part, weights)
    except Exception:  # a custom loss may need what compile gives it
        return
    if not _is_finite(own) or _is_finite(in_fit):
        return
    of_output = f" of output '{part.output}'" if part.output else ""
    start = (
        "All outputs of the model are finite, but the weighted loss is not. "
        f"Without weights, the loss '{part.loss}'{of_output} is {own:.3g}."
    )
    if not _is_finite(with_factor):
        yield Cause(
            "weights of the loss that are too large",
            f"{start} Its weight in loss_weights is {factor:.3g}, and their product is not finite.",
            f"use smaller loss_weights in compile: {SMALLER}.",
        )
    if weights is not None and (_is_finite(with_factor) or not _is_finite(with_samples)):
        yield from _of_samples(part, weights, start)


def _of_samples(part: Evidence, weights: np.ndarray, start: str) -> Iterator[Cause]:
    """Yields the cause if the loss is finite with the same sample weights on a smaller scale."""
    sizes = np.abs(weights.astype("float64"))
    largest = sizes.max(initial=1.0)
    if largest == 1.0 or not _is_finite(batch_loss(part, weights / largest)):
        return
    name = next(name for name in part.data if name.startswith("sample_weight"))
    is_largest = sizes == largest
    rows = is_largest.reshape(len(sizes), -1).any(1)
    where = "" if rows.all() else f" in {rows_text(rows)}"
    which = "sample weights, or a smaller class_weight in fit"
    classes = "" if rows.all() else weighted_classes(part, name, is_largest)
    if classes:
        which = "numbers in class_weight of fit"
        where = (
            f" in all examples of class {classes}, and in no others. Keras computes such sample "
            "weights from class_weight"
        )
    is_scaled = abs(part.loss_weight) > 1
    factor = f" The weight in loss_weights is {part.loss_weight:.3g}." * is_scaled
    yield Cause(
        "weights of the loss that are too large",
        f"{start} '{name}' reaches {weights[is_largest][0]:.3g}{where}.{factor}",
        f"use smaller {which}: {SMALLER}{'; use smaller loss_weights too' * is_scaled}.",
    )


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)
