"""Rule for the causes of a bad update of a weight."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import Any

import keras

from tfwd import _keras
from tfwd.numerics.bad_step_report import Cause
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.overflow import overflow_in_optimizer
from tfwd.numerics.causes.weight_decay import SMALLER, growing_decay
from tfwd.numerics.leaf_optimizers import leaf_optimizers

# The smallest normal numbers. TensorFlow may treat smaller numbers as 0.
SMALLEST = {"float16": 2.0**-14, "float32": 2.0**-126, "float64": 2.0**-1022}


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
    if epsilon := _epsilon_of_zero(evidence):
        yield Cause(
            "an update out of range",
            f"The gradient and the learning rate are finite, but the new value of "
            f"'{one.frame.name}' is not. {epsilon}",
            "use a larger epsilon in the optimizer (Keras's default is 1e-7; in float16 at least "
            "1e-4), and keep weights in float32.",
        )
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


def _epsilon_of_zero(evidence: Evidence) -> str:
    """Returns that an optimizer's epsilon counts as 0, as text; "" if no update divides by 0.

    Adam and similar optimizers divide by epsilon plus a mean or a root of squared gradients. These
    squares must be 0 for some element in this step.
    """
    first = evidence.first
    least = SMALLEST.get(first.frame.dtype, SMALLEST["float32"])
    gradients = evidence.of("weight gradient")
    own = [one for one in gradients if one.frame.name == first.frame.name] or gradients
    zeros = [one for one in own if one.detail.summary.zeros]
    small = [one for one in own if one.detail.summary.abs_min**2 < least]
    if not (zeros or small) or not isinstance(evidence.model, keras.Model):
        return ""
    for leaf in leaf_optimizers(evidence.model):
        epsilon = getattr(leaf, "epsilon", None)
        if not isinstance(epsilon, Real) or abs(float(epsilon)) >= least:
            continue
        counts = "" if epsilon == 0 else f", which may count as 0 in {first.frame.dtype}"
        found = (zeros or small)[0]
        count = found.detail.summary.zeros
        has = f"has {count} zero{'s' * (count > 1)}"
        if not zeros:
            has = f"has elements of {found.detail.summary.abs_min:.3g}, whose squares are 0"
        nan = bool(first.detail.summary.nan)
        return (
            f"The optimizer's epsilon is {float(epsilon):.3g}{counts}. {type(leaf).__name__} "
            "divides by a mean or root of squared gradients plus epsilon. The gradient of "
            f"'{found.frame.name}' {has}. If the gradients of earlier steps are 0 there too, the "
            f"update is {'0/0' if nan else 'a division by 0'}."
        )
    return ""


def _custom_constraint(evidence: Evidence, path: str) -> Any:
    """Returns a weight's constraint. Returns None for Keras's constraints, which are finite."""
    for variable in getattr(evidence.model, "trainable_variables", ()):
        constraint = getattr(variable, "constraint", None)
        if constraint is not None and _keras.variables.path(variable) == path:
            return None if _keras.is_of_keras(type(constraint)) else constraint
    return None
