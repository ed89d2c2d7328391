"""Checked training step: a model's own step, applied only if all its tensors are finite.

- `CheckedStep`: the step of a compiled model, on all replicas. `Outcome` is its result.
- `plain_step`: the same step without checks.
- `tracked`, `variables_in`: variables of a model and other objects. `assign_all` assigns to them.

`checked_step.py` compiles the step and applies or undoes it. `replica_step.py` checks it on one
replica.
"""

from tfwd.numerics.checked_step.checked_step import CheckedStep, Outcome, plain_step
from tfwd.numerics.checked_step.tracked_variables import assign_all, tracked, variables_in

__all__ = ["CheckedStep", "Outcome", "assign_all", "plain_step", "tracked", "variables_in"]
