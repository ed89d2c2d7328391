"""Lists the variables of a model, its metrics and its optimizers, and assigns stored values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import training as _keras_training


def tracked(model: keras.Model) -> list[tf.Variable]:
    """Returns all variables of a model, its metrics, its optimizers, and other objects it holds."""
    optimizers = _keras_training.optimizers(model)
    found = [*model.variables, *(v for metric in model.metrics for v in metric.variables)]
    found += [v for optimizer in optimizers for v in _keras_training.optimizer_state(optimizer)]
    plain = [_keras.variables.tf_variable(v) for v in [*found, *variables_in(model, *optimizers)]]
    return list({id(variable): variable for variable in plain}.values())


def variables_in(*objects: Any) -> list[tf.Variable]:
    """Returns all variables that TensorFlow objects track, at any depth.

    A variable of Keras 3 is not a `tf.Variable`, but contains a `tf.Variable`.
    """
    views = [tf.train.TrackableView(one).descendants() for one in objects]
    # TensorFlow does not see the lists and dicts of Keras 3.
    held = [part for one in objects for value in vars(one).values() for part in _inside(value)]
    found = [
        _keras.variables.tf_variable(part)
        for view in (*views, held)
        for part in view
        if isinstance(part, tf.Variable) or _keras.variables.is_variable(part)
    ]
    return list({id(variable): variable for variable in found}.values())


def _inside(value: Any) -> Iterator[Any]:
    """Yields the entries of lists and dicts, at any depth."""
    if not isinstance(value, (list, tuple, dict)):
        yield value
        return
    for entry in value.values() if isinstance(value, dict) else value:
        yield from _inside(entry)


def assign_all(pairs: Iterable[tuple[tf.Variable, Any]]) -> None:
    """Assigns a value to each variable."""
    for variable, value in pairs:
        variable.assign(value)
