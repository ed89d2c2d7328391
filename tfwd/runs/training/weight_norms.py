"""The norms of a model's weights, for the log; and what is said of one that is not finite."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfwd import _keras
from tfwd.finite import summarize
from tfwd.runs.interfaces import Failure
from tfwd.runs.storage.state import RunState


def norms(model: Any) -> dict[str, float]:
    """The Euclidean norm of each weight that is trained, by its path."""
    return {
        _keras.variables.path(v): float(tf.norm(_keras.variables.value(v)).numpy())
        for v in model.trainable_variables
    }


def failure(model: Any, state: RunState, step: int, loss: float | None) -> Failure | None:
    """What is wrong with the first weight whose norm is not finite; `None` if all are.

    A finite step can still take a weight out of range, which only the next one would see.

    Args:
        model: the model.
        state: has the gradient norm and the learning rate of the last step.
        step: the number of the last step.
        loss: the last one that was logged, if any was.
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
