"""Optimizer calls for a custom training loop, on Keras 3.

A loop has gradients, variables, and its own learning rate. If the optimizer scales the loss, the
loop multiplies the loss before it computes gradients, and the optimizer divides the gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

_LossScale: Any = keras.optimizers.LossScaleOptimizer


def names() -> list[str]:
    """Returns the names of the available optimizers."""
    return [
        name
        for name, found in vars(keras.optimizers).items()
        if inspect.isclass(found)
        and issubclass(found, Optimizer)
        and name not in ("Optimizer", "LossScaleOptimizer")
    ]


def optimizer_class(name: str) -> type:
    """Returns the optimizer class of a name."""
    return getattr(keras.optimizers, name)


def with_loss_scale(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer inside a dynamic loss scale, for float16."""
    return _LossScale(optimizer)


def scales_loss(optimizer: Optimizer) -> bool:
    """Returns True if the loss must be scaled before the gradients are computed."""
    return isinstance(optimizer, _LossScale)


def scale_loss(optimizer: Optimizer, loss: tf.Tensor) -> tf.Tensor:
    """Returns the loss times the optimizer's scale."""
    return optimizer.scale_loss(loss)


def loss_scale(optimizer: Optimizer) -> tf.Tensor:
    """Returns the scale of an optimizer that scales the loss."""
    if not optimizer.built:
        return tf.constant(optimizer.initial_scale, tf.float32)
    return tf.convert_to_tensor(optimizer.dynamic_scale.value)


def build(optimizer: Optimizer, variables: Sequence[Any]) -> None:
    """Creates the optimizer's state for the variables, if it has none yet."""
    if not optimizer.built:
        optimizer.build(variables)


def state(optimizer: Optimizer) -> list[Any]:
    """Returns the optimizer's own variables that exist so far."""
    return list(optimizer.variables)


def set_learning_rate(optimizer: Optimizer, rate: tf.Tensor) -> None:
    """Assigns the learning rate of the next step."""
    optimizer.learning_rate.assign(rate)


def apply(optimizer: Optimizer, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Makes one step.

    Args:
        optimizer: Optimizer that is built for the variables.
        gradients: List as long as `variables`, with None for a missing gradient. If the optimizer
            scales the loss, gradients of the scaled loss.
        variables: Variables that the optimizer was built for.
    """
    optimizer.apply(gradients, variables)
