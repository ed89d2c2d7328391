"""Rules for causes in the loss function, and in losses that layers add."""

from __future__ import annotations

import math
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfwd._keras import losses as _keras_losses
from tfwd.numerics.bad_step_report import Cause
from tfwd.numerics.causes import one_loss
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.large_weights import large_weights
from tfwd.numerics.causes.loss_rows import is_bad


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
        yield from list(large_weights(part)) or one_loss.causes(part)


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
