"""Optimizer calls for a custom training loop, on Keras 3.

A loop has gradients and variables, and a learning rate that it chose itself. It multiplies the loss
before the gradient is taken where the optimizer scales it, and the optimizer divides again.
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
    """The names of the optimizers that there are, as a user gives them."""
    return [
        name
        for name, found in vars(keras.optimizers).items()
        if inspect.isclass(found)
        and issubclass(found, Optimizer)
        and name not in ("Optimizer", "LossScaleOptimizer")
    ]


def optimizer_class(name: str) -> type:
    """The optimizer of one of the names."""
    return getattr(keras.optimizers, name)


def with_loss_scale(optimizer: Optimizer) -> Optimizer:
    """The optimizer with a scale of the loss around it that finds itself, for float16."""
    return _LossScale(optimizer)


def scales_loss(optimizer: Optimizer) -> bool:
    """Whether the loss is to be scaled before the gradient is taken."""
    return isinstance(optimizer, _LossScale)


def scale_loss(optimizer: Optimizer, loss: tf.Tensor) -> tf.Tensor:
    """The loss times the optimizer's scale."""
    return optimizer.scale_loss(loss)


def loss_scale(optimizer: Optimizer) -> tf.Tensor:
    """The scale of an optimizer that scales the loss."""
    if not optimizer.built:
        return tf.constant(optimizer.initial_scale, tf.float32)
    return tf.convert_to_tensor(optimizer.dynamic_scale.value)


def build(optimizer: Optimizer, variables: Sequence[Any]) -> None:
    """Makes the optimizer's state for the variables, if it has none yet."""
    if not optimizer.built:
        optimizer.build(variables)


def state(optimizer: Optimizer) -> list[Any]:
    """The optimizer's own variables, as many as there are yet."""
    return list(optimizer.variables)


def set_learning_rate(optimizer: Optimizer, rate: tf.Tensor) -> None:
    """Assigns the learning rate of the next step."""
    optimizer.learning_rate.assign(rate)


def apply(optimizer: Optimizer, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """One step.

    Args:
        optimizer: built for the variables.
        gradients: as long as `variables`; `None` for one that no gradient reaches. Those of a
            scaled loss if the optimizer scales it.
        variables: those that the optimizer was built for.
    """
    optimizer.apply(gradients, variables)
