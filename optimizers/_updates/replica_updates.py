"""Updates variables on all replicas of a distribution strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfwd import _keras


def on_every_replica(variables: Sequence[Any], update: Callable[..., None], *args: Any) -> None:
    """Calls `update(variable, *values)` on every replica's copy of each variable.

    Args:
        variables: Variables of layers or of optimizers.
        update: Function. Its arguments are the copy, and one element of each list in `args`.
        *args: Lists as long as `variables`. Their elements have a copy on each replica.
    """

    def merged(strategy: tf.distribute.Strategy, *lists: Any) -> None:
        for variable, *values in zip(*lists, strict=True):
            strategy.extended.update(variable, update, args=tuple(values), group=False)

    plain = [_keras.variables.tf_variable(variable) for variable in variables]
    tf.__internal__.distribute.interim.maybe_merge_call(
        merged, tf.distribute.get_strategy(), plain, *args
    )
