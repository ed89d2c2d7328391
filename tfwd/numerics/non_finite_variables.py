"""Finds weights of a model and variables of its optimizers that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import training as _keras_training
from tfwd.finite import all_finite
from tfwd.numerics.checked_tensors import Frame
from tfwd.numerics.leaf_optimizers import SAFE, leaf_optimizers


def non_finite_paths(
    model: keras.Model, selects: Callable[[str], bool], *, states: bool
) -> list[str]:
    """Returns the paths of the non-finite weights and of `non_finite_slots`.

    Args:
        model: The model.
        selects: Function that returns False for the path of a weight to leave out.
        states: bool. False if a state of a layer, such as a running minimum, may be infinite. NaN
            always counts.
    """
    weights = _keras.variables.weights(model)
    bad = non_finite([v for v in weights if selects(_keras.variables.path(v))])
    trained = {id(variable) for variable in _keras.variables.trainable_variables(model)}
    if not states:
        bad = [variable for variable in bad if id(variable) in trained or _has_nan(variable)]
    variables = [*bad, *non_finite_slots(model)]
    return list(dict.fromkeys(map(_keras.variables.path, variables)))


def is_state(model: keras.Model, frame: Frame) -> bool:
    """Returns True for a weight of a layer that optimizers do not update, such as a moving mean."""
    if frame.kind != "weight":
        return False
    trained = {id(variable) for variable in _keras.variables.trainable_variables(model)}
    return any(
        _keras.variables.path(variable) == frame.name and id(variable) not in trained
        for variable in _keras.variables.weights(model)
    )


def non_finite_slots(model: keras.Model) -> list[Any]:
    """Returns the variables of the innermost optimizers that are not finite, such as momentum.

    The variables of other optimizers than `SAFE` may be infinite on purpose. The learning rate is
    checked in each step.
    """
    slots = [
        variable
        for leaf in leaf_optimizers(model)
        if type(leaf).__name__ in SAFE
        for variable in _keras_training.optimizer_state(leaf)
        if "learning_rate" not in _keras.variables.path(variable)
    ]
    return non_finite(slots)


def non_finite(variables: Sequence[Any]) -> list[Any]:
    """Returns the variables that are not finite. One check suffices if all variables are finite."""
    values = [_keras.variables.value(variable) for variable in variables]
    if bool(all_finite(values)):
        return []
    return [v for v, value in zip(variables, values, strict=True) if not bool(all_finite([value]))]


def _has_nan(variable: Any) -> bool:
    value = tf.convert_to_tensor(_keras.variables.value(variable))
    return bool(tf.reduce_any(tf.math.not_equal(value, value)))
