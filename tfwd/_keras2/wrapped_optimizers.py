"""Optimizers inside optimizers on Keras 2.15, which has two kinds that do not mix.

The newer ones (`keras.optimizers`) update with `update_step`. The legacy ones
(`keras.optimizers.legacy`, and all of tensorflow-addons') update with `_resource_apply_dense` and
similar methods. The functions look through tfwd's own wrappers, loss scales, and tensorflow-addons'
averages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfwd._keras_shared.holding import OptimizerHolder

New: Any = keras.optimizers.Optimizer
Legacy: Any = keras.optimizers.legacy.Optimizer
LossScaleOptimizer: Any = keras.mixed_precision.LossScaleOptimizer


def is_legacy(optimizer: Any) -> bool:
    """Returns True for an optimizer of the legacy kind."""
    return isinstance(optimizer, Legacy)


def name(optimizer: Any) -> str:
    """Returns the optimizer's name."""
    return optimizer._name if is_legacy(optimizer) else optimizer.name


def leaves(optimizer: Any) -> list[Any]:
    """Returns the optimizers that make the updates. On Keras 2 there is always one.

    An average of tensorflow-addons makes one update together with the optimizer inside.
    """
    while isinstance(optimizer, (OptimizerHolder, LossScaleOptimizer)):
        optimizer = optimizer.inner_optimizer
    return [optimizer]


def leaf_of(optimizer: Any, variable: Any) -> Any:
    """Returns the optimizer that updates a variable."""
    return leaves(optimizer)[0]


def is_built_for(optimizer: Any, variable: Any) -> bool:
    """Returns True if a built optimizer updates a variable."""
    return is_legacy(optimizer) or key(optimizer, variable) in optimizer._index_dict


def chain(optimizer: Any) -> Iterator[Any]:
    """Yields the optimizer and all optimizers in it. The outer ones come first."""
    while optimizer is not None:
        yield optimizer
        if isinstance(optimizer, LossScaleOptimizer):
            optimizer = optimizer.inner_optimizer
        elif isinstance(optimizer, OptimizerHolder):
            optimizer = optimizer.optimizer
        else:
            optimizer = _averaged(optimizer)


def _averaged(optimizer: Any) -> Any:
    """Returns the optimizer in Lookahead, SWA and MovingAverage of tensorflow-addons."""
    held = vars(optimizer).get("_optimizer")
    return held if is_legacy(held) else None


def own_decays(optimizer: Any) -> dict[str, Any]:
    """Returns the arguments with which an optimizer decays weights itself, with their values."""
    arguments = vars(optimizer).get("_hyper", {}) if is_legacy(optimizer) else vars(optimizer)
    decays = {
        argument: float(value.numpy()) if isinstance(value, tf.Variable) else value
        for argument, value in arguments.items()
        if argument.endswith("weight_decay") and not argument.startswith("_")
    }
    return {argument: value for argument, value in decays.items() if value}


def lowers_scale(optimizer: Any) -> bool:
    """Returns True if an active loss scale inside waits for gradients that are not finite."""
    scale = _scale(optimizer)
    return scale is not None and scale.dynamic


def key(optimizer: Any, variable: Any) -> Any:
    """Returns a key that is the same for a variable and its copies on the replicas."""
    if not isinstance(variable, tf.distribute.DistributedValues):
        for copy in (variable, getattr(variable, "handle", None)):
            container: Any = getattr(copy, "_distributed_container", None)
            if container is not None:
                return container()._unique_id
    return variable._unique_id


def accumulates(optimizer: Any) -> bool:
    """Returns True if one update uses the gradients of several steps. Keras 2 never does."""
    return False


def _rate_of(leaf: Any) -> Any:
    """Returns the optimizer that has the learning rate. An average uses its inner optimizer's."""
    return next((held for held in reversed(list(chain(leaf))) if is_legacy(held)), leaf)


def has_learning_rate(leaf: Any) -> bool:
    """Returns True if an optimizer has a learning rate. COCOB has none."""
    return not is_legacy(leaf) or "learning_rate" in _rate_of(leaf)._hyper


def has_fixed_rate(leaf: Any) -> bool:
    """Returns True if the learning rate is a number, not a schedule or a function."""
    if not is_legacy(leaf):
        return isinstance(leaf._learning_rate, tf.Variable)
    rate = _rate_of(leaf)._hyper.get("learning_rate")
    return isinstance(rate, (int, float, tf.Variable))


def initial_rate(leaf: Any) -> float:
    """Returns the learning rate of an optimizer's first update."""
    source = _rate_of(leaf)
    rate = source._hyper["learning_rate"] if is_legacy(leaf) else source._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return float(rate(tf.constant(0, tf.int64)))
    return float(rate() if callable(rate) and not tf.is_tensor(rate) else rate)


def learning_rate(leaf: Any) -> Any:
    """Returns the learning rate of an update that is made now, or None if there is none."""
    if not is_legacy(leaf):
        rate = leaf._learning_rate
        schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
        return rate(leaf.iterations) if schedule else rate
    if not has_learning_rate(leaf):
        return None
    return _rate_of(leaf)._decayed_lr(tf.as_dtype(keras.backend.floatx()))


def scale_loss(optimizer: Any, loss: tf.Tensor) -> tf.Tensor:
    """Returns the loss times the optimizer's scale. `apply` expects gradients of that loss."""
    scale = _scale(optimizer)
    return loss if scale is None else scale.get_scaled_loss(loss)


def apply(optimizer: Any, grads: Any, variables: Any) -> None:
    """Makes one step, with the gradients of a loss that `scale_loss` has scaled."""
    scale = _scale(optimizer)
    if scale is not None:
        grads = scale.get_unscaled_gradients(grads)
    optimizer.apply_gradients(list(zip(grads, variables, strict=True)))


def _scale(optimizer: Any) -> Any:
    while isinstance(optimizer, OptimizerHolder):
        optimizer = optimizer.inner
    return optimizer if isinstance(optimizer, LossScaleOptimizer) else None
