"""Rule for a recurrent layer whose state grows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfwd import _keras
from tfwd.finite import SQUARED_IS_FINITE
from tfwd.numerics.bad_step_report import Cause
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.gradient_clipping import or_clip
from tfwd.numerics.causes.overflow import exp_limit
from tfwd.numerics.tensor_measurements import Measurement

BOUNDED = ("tanh", "sigmoid", "softsign", "hard_sigmoid", "hard_tanh")
ENORMOUS = 1e6  # a state of this size has grown


def growing_state(evidence: Evidence) -> Iterator[Cause]:
    """Checks for a recurrent layer whose state becomes non-finite at a later time step."""
    first = evidence.first
    steps = first.detail.steps
    if first.frame.kind != "output" or not first.frame.has_time or not steps.any():
        return
    step = int(steps.argmax())
    if not step:
        return
    layer = evidence.layer(first.frame.name)
    given = evidence.before
    if given is not None and given.detail.summary.abs_max > SQUARED_IS_FINITE:
        return  # one step suffices
    if _has_custom_cell(layer) and not _is_large(first, step):
        return  # the cell may compute a root or a logarithm; a state that grows is large first
    activation = getattr(getattr(layer, "activation", None), "__name__", "")
    unbounded = bool(activation) and activation not in BOUNDED
    reason = (
        f' Its activation="{activation}" is unbounded, so the state can grow in each time step.'
        if unbounded
        else ""
    )
    advice = (
        f"give '{first.frame.name}' activation=\"tanh\", Keras's default, instead of "
        f'"{activation}"'
        if unbounded
        else "use a bounded activation (tanh)"
    )
    if "GRU" not in first.frame.layer and "LSTM" not in first.frame.layer:
        advice += (
            "; or a layer with gates (LSTM, GRU), an orthogonal initial recurrent kernel, or a "
            "normalization inside the cell"
        )
    if not evidence.is_first:
        advice = f"lower the learning rate{or_clip(evidence)}; {advice}"
    yield Cause(
        "a state that grows from step to step",
        f"The inputs of '{first.frame.name}' are finite. Its state is finite up to time step "
        f"{step - 1}, and not finite at time step {step}.{reason}",
        f"{advice}. Shorter sequences only hide the problem.",
    )


def _has_custom_cell(layer: Any) -> bool:
    """Returns True if a recurrent layer calls functions that are not Keras's."""
    cell = getattr(getattr(layer, "forward_layer", layer), "cell", None)
    if cell is None:
        return False
    cells = [cell, *_keras.layers.all_layers(cell)]
    functions = [getattr(one, "activation", None) for one in cells]
    return any(not _keras.is_of_keras(type(one)) for one in cells) or any(
        callable(one) and hasattr(one, "__module__") and not _keras.is_of_keras(one)
        for one in functions
    )


def _is_large(first: Measurement, step: int) -> bool:
    """Returns True if a state before a time step is so large that it can grow to infinity there.

    The exponential of such a state is infinite. The state must also be far larger than in the time
    steps before: a moderate state is not said to grow if its size is only the size of its inputs.
    """
    sizes, limit = first.detail.step_sizes, exp_limit(first)
    if len(sizes) <= step:  # not measured
        return bool(max(first.detail.high, -first.detail.low) > limit)
    last, earlier = sizes[step - 1], max(sizes[: step - 1], default=0)
    return bool(last > limit and (last > 2 * earlier or last > ENORMOUS))
