"""Optimizer calls for a custom training loop, on Keras 2 and tensorflow-addons.

Keras 2 has two kinds of optimizers: the newer ones of `keras.optimizers`, and the legacy ones. All
optimizers of tensorflow-addons are legacy ones. The two kinds create their state and store their
learning rate differently.
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

# The optimizers of tensorflow-addons that do not wrap another optimizer.
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
    """Returns the names of the available optimizers."""
    found = [
        name
        for name, kind in vars(keras.optimizers).items()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and name != "Optimizer"
    ]
    if importlib.util.find_spec("tensorflow_addons") is not None:
        found += [f"tfa.{name}" for name in ADDONS]
    return found


def optimizer_class(name: str) -> type:
    """Returns the optimizer class of a name."""
    if not name.startswith("tfa."):
        return getattr(keras.optimizers, name)
    with warnings.catch_warnings():  # ignore the warning that its development has ended
        warnings.simplefilter("ignore")
        import tensorflow_addons
    return getattr(tensorflow_addons.optimizers, name.removeprefix("tfa."))


def with_loss_scale(optimizer: Any) -> Any:
    """Returns the optimizer inside a dynamic loss scale, for float16."""
    return _LossScale(optimizer)


def scales_loss(optimizer: Any) -> bool:
    """Returns True if the loss must be scaled before the gradients are computed."""
    return isinstance(optimizer, _LossScale)


def scale_loss(optimizer: Any, loss: tf.Tensor) -> tf.Tensor:
    """Returns the loss times the optimizer's scale."""
    return optimizer.get_scaled_loss(loss)


def loss_scale(optimizer: Any) -> tf.Tensor:
    """Returns the scale of an optimizer that scales the loss."""
    return optimizer.loss_scale


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Creates the optimizer's state for the variables."""
    if isinstance(optimizer, LegacyOptimizer) and not hasattr(optimizer, "build"):
        optimizer._create_all_weights(list(variables))
    else:
        optimizer.build(list(variables))


def state(optimizer: Any) -> list[Any]:
    """Returns the optimizer's own variables that exist so far."""
    found = optimizer.variables
    return list(found() if callable(found) else found)


def set_learning_rate(optimizer: Any, rate: tf.Tensor) -> None:
    """Assigns the learning rate of the next step, if the optimizer has one. COCOB has none."""
    for leaf in leaves(optimizer):
        if not isinstance(leaf, LegacyOptimizer):
            leaf.learning_rate.assign(rate)
        elif "learning_rate" in leaf._hyper:
            leaf._create_hypers()
            leaf._hyper["learning_rate"].assign(rate)


def apply(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Makes one step.

    Args:
        optimizer: Optimizer that is built for the variables.
        gradients: List as long as `variables`, with None for a missing gradient. If the optimizer
            scales the loss, gradients of the scaled loss.
        variables: Variables that the optimizer was built for.
    """
    if scales_loss(optimizer):
        gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(_reached(gradients, variables))
    elif hasattr(optimizer, "apply"):  # an optimizer of tfwd, which also gets missing gradients
        optimizer.apply(gradients, variables)
    else:
        optimizer.apply_gradients(_reached(gradients, variables))


def _reached(gradients: Sequence[Any], variables: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Returns the pairs with a gradient. Keras would warn about other pairs in every trace."""
    pairs = zip(gradients, variables, strict=True)
    return [(gradient, variable) for gradient, variable in pairs if gradient is not None]
