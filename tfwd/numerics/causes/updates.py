"""Rule for the causes of a bad update of a weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfwd import _keras
from tfwd.numerics.bad_step_report import Cause
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.overflow import overflow_in_optimizer
from tfwd.numerics.causes.weight_decay import SMALLER, growing_decay


def update(evidence: Evidence) -> Iterator[Cause]:
    """Checks for a non-finite new value of a weight, after a finite gradient."""
    one = evidence.first
    if one.frame.kind != "update":
        return
    rates = [rate.detail.high for rate in evidence.of("learning rate")]
    gradients = evidence.of("weight gradient")
    if not gradients:
        yield Cause(
            "a gradient or an update out of range",
            f"The new value of '{one.frame.name}' is not finite. Its gradient was not checked, "
            "because train_step applies it in a branch (tf.cond) or in an inner tf.function.",
            "tf.debugging.enable_check_numerics() names the operation (without jit_compile). If "
            "train_step calls the model outside of the inner function, FiniteCheck checks the "
            "layers too.",
        )
        return
    shown = f" The learning rate is {', '.join(f'{rate:.3g}' for rate in rates)}." if rates else ""
    largest = max(gradients, key=lambda found: found.detail.summary.abs_max)
    shown += (
        f" The largest gradient is {largest.detail.summary.abs_max:.3g}, of '{largest.frame.name}'."
    )
    constraint = _custom_constraint(evidence, one.frame.name)
    if constraint is not None:
        name = getattr(constraint, "__name__", type(constraint).__name__)
        yield Cause(
            "an update out of range",
            f"The gradient and the learning rate are finite, but the new value of "
            f"'{one.frame.name}' is not. The weight has the constraint '{name}', which is applied "
            f"after the update.{shown}",
            "call the constraint on the weight, and look in the constraint for a division by "
            "zero, a root or a logarithm; if its result is finite, lower the learning rate.",
        )
        return
    if overflow_in_optimizer(evidence):  # another rule explains the update
        return
    shown += growing_decay(evidence)
    smaller = f"{SMALLER}; " if growing_decay(evidence) else ""
    yield Cause(
        "an update out of range",
        f"The gradient and the learning rate are finite, but the new value of '{one.frame.name}' "
        f"is not.{shown}",
        f"{smaller}lower the learning rate; use a larger epsilon in the optimizer (in float16 at "
        "least 1e-4), and keep weights in float32.",
    )


def _custom_constraint(evidence: Evidence, path: str) -> Any:
    """Returns a weight's constraint. Returns None for Keras's constraints, which are finite."""
    for variable in getattr(evidence.model, "trainable_variables", ()):
        constraint = getattr(variable, "constraint", None)
        if constraint is not None and _keras.variables.path(variable) == path:
            return None if _keras.is_of_keras(type(constraint)) else constraint
    return None
