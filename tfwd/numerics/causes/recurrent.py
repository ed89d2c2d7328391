"""Rule for a recurrent layer whose state grows."""

from __future__ import annotations

from collections.abc import Iterator

from tfwd import _keras
from tfwd.finite import SQUARED_IS_FINITE
from tfwd.numerics.bad_step_report import Cause
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.overflow import exp_limit

BOUNDED = ("tanh", "sigmoid", "softsign", "hard_sigmoid", "hard_tanh")


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
    infinite = first.detail.summary.non_finite - first.detail.summary.nan
    given = evidence.before
    if given is not None and given.detail.summary.abs_max > SQUARED_IS_FINITE:
        return  # one step suffices
    is_large = infinite or max(first.detail.high, -first.detail.low) > exp_limit(first)
    has_custom_cell = hasattr(layer, "cell") and not _keras.is_of_keras(type(layer.cell))
    if has_custom_cell and not is_large:
        return  # the cell may compute a root or a quotient; a state that grows is large first
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
        advice = f"lower the learning rate or clip gradients (global_clipnorm=1.0); {advice}"
    yield Cause(
        "a state that grows from step to step",
        f"The inputs of '{first.frame.name}' are finite. Its state is finite up to time step "
        f"{step - 1}, and not finite at time step {step}.{reason}",
        f"{advice}. Shorter sequences only hide the problem.",
    )
