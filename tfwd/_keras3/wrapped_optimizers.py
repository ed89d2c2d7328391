"""Optimizers inside optimizers on Keras 3.

The functions look through tfwd's wrappers, loss scales and Keras's optimizer with several inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfwd._keras_shared.holding import OptimizerHolder

LossScale: Any = keras.optimizers.LossScaleOptimizer
# Newer releases of Keras have an optimizer with another optimizer for each variable.
Multi: Any = getattr(keras.optimizers, "MultiOptimizer", ())


def leaves(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizers that make the updates, as far as they are known before `build`."""
    if isinstance(optimizer, LossScale):
        return leaves(optimizer.inner_optimizer)
    if isinstance(optimizer, OptimizerHolder):
        return leaves(optimizer.inner)
    if isinstance(optimizer, Multi):
        return [leaf for inner in optimizer.optimizers for leaf in leaves(inner)]
    return [optimizer]


def is_legacy(optimizer: Optimizer) -> bool:
    """Returns True for an optimizer of the legacy kind, which Keras 3 does not have."""
    return False


def leaf_of(optimizer: Optimizer, variable: keras.Variable) -> Optimizer:
    """Returns the optimizer that updates a variable. Nothing has to be built."""
    if isinstance(optimizer, LossScale):
        return leaf_of(optimizer.inner_optimizer, variable)
    if isinstance(optimizer, OptimizerHolder):
        return leaf_of(optimizer.inner, variable)
    if isinstance(optimizer, Multi):
        if optimizer.built:  # the map may be a function that creates new optimizers
            index = optimizer._var_to_optimizer_idx[key(optimizer, variable)]
            return leaf_of(optimizer.optimizers[index], variable)
        return leaf_of(optimizer._optimizer_map(variable), variable)
    return optimizer


def is_built_for(optimizer: Optimizer, variable: keras.Variable) -> bool:
    """Returns True if a built optimizer updates a variable."""
    return key(optimizer, variable) in optimizer._trainable_variables_indices


def chain(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yields the optimizer and all optimizers in it. The outer ones come first."""
    yield optimizer
    held: list[Optimizer] = []
    if isinstance(optimizer, LossScale):
        held = [optimizer.inner_optimizer]
    elif isinstance(optimizer, OptimizerHolder):
        held = [optimizer.optimizer]
    elif isinstance(optimizer, Multi):
        held = optimizer.optimizers
    for inner in held:
        yield from chain(inner)


def own_decays(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the arguments, with values, with which a Keras optimizer decays weights itself."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name.endswith("weight_decay") and not name.startswith("_") and value
    }


def lowers_scale(optimizer: Optimizer) -> bool:
    """Returns True if an active loss scale inside waits for gradients that are not finite."""
    while isinstance(optimizer, OptimizerHolder):
        optimizer = optimizer.inner
    return isinstance(optimizer, LossScale)


def name(optimizer: Optimizer) -> str:
    """Returns the optimizer's name."""
    return optimizer.name


def accumulates(optimizer: Optimizer) -> bool:
    """Returns True if one update uses the gradients of several steps."""
    return bool(optimizer.gradient_accumulation_steps)


def has_learning_rate(leaf: Optimizer) -> bool:
    """Returns True if an optimizer has a learning rate. On Keras 3 all have one."""
    return True


def has_fixed_rate(leaf: Optimizer) -> bool:
    """Returns True if the learning rate is a number, not a schedule or a function."""
    return isinstance(leaf._learning_rate, keras.Variable)


def initial_rate(leaf: Optimizer) -> float:
    """Returns the learning rate of an optimizer's first update."""
    rate: Any = leaf._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return float(rate(tf.constant(0, tf.int64)))
    return float(rate() if callable(rate) else rate)


def learning_rate(leaf: Optimizer) -> Any:
    """Returns the learning rate of an update that is made now."""
    return leaf.learning_rate


def key(optimizer: Optimizer, variable: Any) -> Any:
    """Returns a key that a variable, its `tf.Variable` and its replicas' copies share."""
    return optimizer._var_key(variable)
