"""The decay of one variable: w <- w - f*w, as exactly as its dtype allows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def wide(dtype: tf.DType) -> tf.DType:
    """The dtype that the decay of a variable is computed in: half precision is too coarse."""
    return tf.float64 if dtype == tf.float64 else tf.float32


def decay(variable: tf.Variable, fraction: Any) -> None:
    """w <- w - f*w, rounded once.

    Args:
        variable: any floating dtype.
        fraction: f, a scalar of dtype `wide(variable.dtype)`.
    """
    if wide(variable.dtype) == variable.dtype:
        variable.assign_sub(fraction * variable)
    else:
        value = tf.cast(variable, wide(variable.dtype))
        variable.assign(tf.cast(value - fraction * value, variable.dtype))


def decay_rows(variable: tf.Variable, rows: tf.Tensor, fraction: Any) -> None:
    """The same for some rows, each once however often it is named.

    Args:
        variable: of rank 1 at least.
        rows: int `[n]`, with repetitions or without.
        fraction: as for `decay`.
    """
    value = tf.cast(tf.gather(variable, rows), wide(variable.dtype))
    # Assigned and not subtracted: a row that is named twice gets the same value twice.
    decayed = tf.cast(value - fraction * value, variable.dtype)
    variable.scatter_update(tf.IndexedSlices(decayed, rows))
