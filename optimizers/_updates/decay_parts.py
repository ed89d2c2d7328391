"""Which variables and embedding rows a step decays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfwd._keras import wrapped_optimizers


class NamedRows:
    """The rows of a table that a step's gradient names, also where clipping has made it dense."""

    def __init__(self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        self._key = lambda variable: wrapped_optimizers.key(optimizer, variable)
        self._given = {
            self._key(variable): gradient.indices
            for gradient, variable in zip(grads, variables, strict=True)
            if isinstance(gradient, tf.IndexedSlices)
        }

    def __call__(self, leaf: Any, gradient: Any, variable: tf.Variable) -> tf.Tensor | None:
        if isinstance(gradient, tf.IndexedSlices):
            return gradient.indices
        # Of one that was accumulated only the last step's rows are known, and on several replicas
        # only those of this one.
        several = tf.distribute.get_strategy().num_replicas_in_sync > 1
        if wrapped_optimizers.accumulates(leaf) or several:
            return None
        return self._given.get(self._key(variable))


class FirstUpdates:
    """Tells a variable's first update in a step from others, where one is given twice.

    A variable that is tied by standing in the list twice gets two updates, and is decayed once.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self._key = lambda variable: wrapped_optimizers.key(optimizer, variable)
        counts = Counter(map(self._key, variables))
        self._repeated = {key for key, count in counts.items() if count > 1}
        self._seen: set[int] = set()

    def __call__(self, variable: tf.Variable) -> bool:
        if self._key(variable) not in self._repeated:
            return True
        known = id(variable) in self._seen
        self._seen.add(id(variable))
        return not known
