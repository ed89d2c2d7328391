"""The optimizer that a config names."""

from __future__ import annotations

from typing import Any

import keras

from tfwd.lm import rules
from tfwd.lm.errors import UserError


def make_optimizer(
    name: str,
    learning_rate: float,
    *,
    weight_decay: float = 0.0,
    kwargs: dict[str, Any] | None = None,
    dtype_policy: str = "float32",
) -> keras.optimizers.Optimizer:
    """Makes an optimizer of `keras.optimizers`.

    Args:
        name: the class's name, in any case: "sgd", "Adam".
        learning_rate: the base rate; the training step assigns to it.
        weight_decay: Keras's own argument; 0 leaves it out.
        kwargs: more arguments of the class (momentum, beta_1, ...).
        dtype_policy: under "mixed_float16" the optimizer is wrapped to scale the loss.

    Returns:
        The optimizer, without slots yet.

    Raises:
        UserError: there is no such optimizer, or it does not take the arguments.

    Example:
        >>> make_optimizer("sgd", 0.5, kwargs={"momentum": 0.9}).momentum
        0.9
    """
    if not rules.OPTIMIZER.holds(name):
        hint = rules.OPTIMIZER.hint(name)
        raise UserError(f"optimizer.name={name!r}: give {rules.OPTIMIZER.right}{hint}")
    arguments = dict(kwargs or {})
    if weight_decay:
        arguments["weight_decay"] = weight_decay
    try:
        optimizer = rules.optimizers()[name.lower()](learning_rate=learning_rate, **arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer {name} with {arguments}: {error}") from error
    if dtype_policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer
