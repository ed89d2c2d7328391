"""Norms of a model's weights for the log, and the check that they are finite."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfwd import _keras
from tfwd.finite import summarize
from tfwd.runs.interfaces import Failure
from tfwd.runs.training.step_variables import StepVariables


def norms(model: Any) -> dict[str, float]:
    """Returns the Euclidean norm of each trained weight, by its path."""
    return {
        _keras.variables.path(v): float(tf.norm(_keras.variables.value(v)).numpy())
        for v in model.trainable_variables
    }


def failure(model: Any, state: StepVariables, step: int, loss: float | None) -> Failure | None:
    """Returns the failure of the first weight whose norm is not finite, or `None`.

    A finite step can still make a weight infinite. Only the next step would notice it.

    Args:
        model: the model.
        state: the `StepVariables` with the gradient norm and the learning rate of the last step.
        step: int. The number of the last step.
        loss: the last logged loss, or `None`.
    """
    wrong = [path for path, norm in norms(model).items() if not math.isfinite(norm)]
    if not wrong:
        return None
    (value,) = [v for v in model.trainable_variables if _keras.variables.path(v) == wrong[0]]
    found = summarize(_keras.variables.value(value)).numbers()
    what = f"{found}" if found.non_finite else f"its elements reach {found.abs_max:.3g}"
    return Failure(
        step,
        math.nan if loss is None else loss,
        float(state.gradient_norm.numpy()),
        float(state.learning_rate.numpy()),
        f"weight {wrong[0]}",
        f"its norm is not finite, {what}",
    )
