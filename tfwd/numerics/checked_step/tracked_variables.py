"""Lists the variables of a model, its metrics and its optimizers, and assigns stored values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.trackable.base import Trackable

from tfwd import _keras
from tfwd._keras import training as _keras_training


def tracked(model: keras.Model) -> list[tf.Variable]:
    """Returns all variables of a model, its metrics, its optimizers, and other objects it holds."""
    optimizers = _keras_training.optimizers(model)
    variables = _keras.variables.all_variables(model)
    found = [*variables, *(v for metric in model.metrics for v in metric.variables)]
    found += [v for optimizer in optimizers for v in _keras_training.optimizer_state(optimizer)]
    plain = [_keras.variables.tf_variable(v) for v in [*found, *variables_in(model, *optimizers)]]
    return list({id(variable): variable for variable in plain}.values())


def variables_in(*objects: Any) -> list[tf.Variable]:
    """Returns all variables that TensorFlow objects track, at any depth.

    A variable of Keras 3 is not a `tf.Variable`, but contains a `tf.Variable`.
    """
    seen: dict[int, Any] = {}
    queue = list(objects)
    while queue:
        one = queue.pop(0)
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, Trackable) and not isinstance(one, tf.Variable):
            queue += tf.train.TrackableView.children(one).values()
            if hasattr(one, "__dict__"):  # TensorFlow does not see the lists and dicts of Keras 3
                queue += _keras.held_by(one)
    found = [
        _keras.variables.tf_variable(one)
        for one in seen.values()
        if isinstance(one, tf.Variable) or _keras.variables.is_variable(one)
    ]
    return list({id(variable): variable for variable in found}.values())


def assign_all(pairs: Iterable[tuple[tf.Variable, Any]]) -> None:
    """Assigns a value to each variable."""
    for variable, value in pairs:
        variable.assign(value)
