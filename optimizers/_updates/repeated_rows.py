"""Sums the parts of a sparse gradient in which a row occurs more than once.

A lookup adds a part to the gradient for each use of a row, in a `tf.IndexedSlices`. Keras 3's
optimizers treat each part as the row's whole gradient. Adam's second moment then contains the sum
of the squared parts. The square of the summed parts would be correct.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfwd import _keras
from tfwd._keras import update_interception, wrapped_optimizers


def summed(gradient: Any) -> Any:
    """Returns the gradient with each row once.

    Args:
        gradient: Tensor, or `tf.IndexedSlices` with or without repeated rows.

    Returns:
        A tensor unchanged. For slices, slices of the distinct rows with the sums of their parts, in
        the order of the rows' first parts.

    Example:
        >>> parts = tf.IndexedSlices([[1.0], [5.0], [2.0]], [3, 0, 3], [4, 1])
        >>> rows = summed(parts)
        >>> rows.indices.numpy(), rows.values.numpy().T
        (array([3, 0], dtype=int32), array([[3., 5.]], dtype=float32))
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


class SumsRows(_keras.wrapped_optimizers.OptimizerWrapper):
    """A wrapper whose optimizer sees each row of a sparse gradient once.

    Args:
        optimizer: Wrapped optimizer.
        sum_repeated_rows: bool. Sums repeated rows before clipping and before the step. Default
            True.
        name: str. Name of the wrapper. Default None.

    Raises:
        TypeError: If sum_repeated_rows is not a bool, or if the optimizer is not a Keras optimizer.
    """

    def __init__(
        self, optimizer: Any, sum_repeated_rows: bool = True, name: str | None = None
    ) -> None:
        if not isinstance(sum_repeated_rows, bool):
            raise TypeError(
                f"{type(self).__name__}: sum_repeated_rows={sum_repeated_rows!r}: expected "
                "True, or False to leave repeated rows to the wrapped optimizer"
            )
        super().__init__(optimizer, name=name)
        self.sum_repeated_rows = sum_repeated_rows

    def _apply(self, grads: list[Any], variables: list[Any], make: Callable[[], Any]) -> Any:
        sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in grads)
        if not (sparse and self.sum_repeated_rows):
            return super()._apply(grads, variables, make)
        with update_interception.rows_summed(wrapped_optimizers.leaves(self.inner), summed):
            return super()._apply(grads, variables, make)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "sum_repeated_rows": self.sum_repeated_rows}
