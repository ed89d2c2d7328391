"""Optimizer calls for a custom training loop, on Keras 2 and tensorflow-addons.

Keras 2 has two kinds of optimizers: the newer ones, of `keras.optimizers`, and the legacy ones, on
which all of tensorflow-addons stands. They make their state and hold their learning rate each in
its own way.
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer
from keras.optimizers.legacy import Optimizer as LegacyOptimizer

from tfwd._keras2.wrapped_optimizers import leaves

_LossScale: Any = keras.mixed_precision.LossScaleOptimizer

# Those of tensorflow-addons that are optimizers by themselves, and not around another one.
ADDONS = (
    "AdaBelief",
    "COCOB",
    "ConditionalGradient",
    "LAMB",
    "LazyAdam",
    "NovoGrad",
    "RectifiedAdam",
    "Yogi",
)


def names() -> list[str]:
    """The names of the optimizers that there are, as a user gives them."""
    found = [
        name
        for name, kind in vars(keras.optimizers).items()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and name != "Optimizer"
    ]
    if importlib.util.find_spec("tensorflow_addons") is not None:
        found += [f"tfa.{name}" for name in ADDONS]
    return found


def optimizer_class(name: str) -> type:
    """The optimizer of one of the names."""
    if not name.startswith("tfa."):
        return getattr(keras.optimizers, name)
    with warnings.catch_warnings():  # that its development has ended, which the user knows
        warnings.simplefilter("ignore")
        import tensorflow_addons
    return getattr(tensorflow_addons.optimizers, name.removeprefix("tfa."))


def with_loss_scale(optimizer: Any) -> Any:
    """The optimizer with a scale of the loss around it that finds itself, for float16."""
    return _LossScale(optimizer)


def scales_loss(optimizer: Any) -> bool:
    """Whether the loss is to be scaled before the gradient is taken."""
    return isinstance(optimizer, _LossScale)


def scale_loss(optimizer: Any, loss: tf.Tensor) -> tf.Tensor:
    """The loss times the optimizer's scale."""
    return optimizer.get_scaled_loss(loss)


def loss_scale(optimizer: Any) -> tf.Tensor:
    """The scale of an optimizer that scales the loss."""
    return optimizer.loss_scale


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes the optimizer's state for the variables."""
    if isinstance(optimizer, LegacyOptimizer) and not hasattr(optimizer, "build"):
        optimizer._create_all_weights(list(variables))
    else:
        optimizer.build(list(variables))


def state(optimizer: Any) -> list[Any]:
    """The optimizer's own variables, as many as there are yet."""
    found = optimizer.variables
    return list(found() if callable(found) else found)


def set_learning_rate(optimizer: Any, rate: tf.Tensor) -> None:
    """Assigns the learning rate of the next step, where the optimizer has one: COCOB has none."""
    for leaf in leaves(optimizer):
        if not isinstance(leaf, LegacyOptimizer):
            leaf.learning_rate.assign(rate)
        elif "learning_rate" in leaf._hyper:
            leaf._create_hypers()
            leaf._hyper["learning_rate"].assign(rate)


def apply(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """One step.

    Args:
        optimizer: built for the variables.
        gradients: as long as `variables`; `None` for one that no gradient reaches. Those of a
            scaled loss if the optimizer scales it.
        variables: those that the optimizer was built for.
    """
    if scales_loss(optimizer):
        gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(_reached(gradients, variables))
    elif hasattr(optimizer, "apply"):  # one of tfwd's, which is told of the others too
        optimizer.apply(gradients, variables)
    else:
        optimizer.apply_gradients(_reached(gradients, variables))


def _reached(gradients: Sequence[Any], variables: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The pairs that have a gradient: of the others Keras would warn in every trace."""
    pairs = zip(gradients, variables, strict=True)
    return [(gradient, variable) for gradient, variable in pairs if gradient is not None]
