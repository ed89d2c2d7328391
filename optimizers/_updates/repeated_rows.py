"""Adds up the parts of a sparse gradient in which a row stands more than once.

A lookup gives a part of the gradient for each time that a row was used, side by side in a
`tf.IndexedSlices`. Keras 3's optimizers compute with these parts as if each were a row's whole
gradient, so Adam's second moment has the sum of their squares and not the square of their sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfwd import _keras
from tfwd._keras import updates as _keras_updates
from tfwd._keras import wrapped_optimizers


def summed(gradient: Any) -> Any:
    """The gradient with each row once.

    Args:
        gradient: a tensor, or a `tf.IndexedSlices` with repeated rows or without.

    Returns:
        A tensor as it is; of slices, slices of the different rows, in the order of their first
        parts, each with the sum of its parts.

    Example:

    >>> parts = tf.IndexedSlices([[1.0], [5.0], [2.0]], [3, 0, 3], [4, 1])
    >>> rows = summed(parts)
    >>> rows.indices.numpy(), rows.values.numpy().T
    (array([3, 0], dtype=int32), array([[3., 5.]], dtype=float32))
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


class SumsRows(_keras.optimizer_wrapper.OptimizerWrapper):
    """A wrapper whose optimizer sees each row of a sparse gradient once.

    Args:
        optimizer: the one that is held.
        sum_repeated_rows: whether repeated rows are added up, before clipping and before the step.
        name: the wrapper's name.

    Raises:
        TypeError: sum_repeated_rows is not a bool, or the optimizer is not a Keras optimizer.
    """

    def __init__(
        self, optimizer: Any, sum_repeated_rows: bool = True, name: str | None = None
    ) -> None:
        if not isinstance(sum_repeated_rows, bool):
            raise TypeError(
                f"{type(self).__name__}: sum_repeated_rows={sum_repeated_rows!r}: give True, or "
                "False for what the wrapped optimizer itself does with a row that is repeated"
            )
        super().__init__(optimizer, name=name)
        self.sum_repeated_rows = sum_repeated_rows

    def _apply(self, grads: list[Any], variables: list[Any], make: Callable[[], Any]) -> Any:
        sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in grads)
        if not (sparse and self.sum_repeated_rows):
            return super()._apply(grads, variables, make)
        with _keras_updates.rows_summed(wrapped_optimizers.leaves(self.inner), summed):
            return super()._apply(grads, variables, make)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "sum_repeated_rows": self.sum_repeated_rows}
