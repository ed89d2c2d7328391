"""Detailed measurement of a tensor: a summary, its range, and where it is not finite."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfwd.dtypes import at_least_float32
from tfwd.finite import Summary, as_floating, summarize
from tfwd.numerics.checked_tensors import Frame


class Detail(NamedTuple):
    """Detailed measurement of a tensor, as tensors or as arrays.

    Attributes:
        summary: see `tfwd.numerics.Summary`.
        low, high: the smallest and the largest finite element; +Inf and -Inf if there is none.
        width: the size of the last axis; 0 for a scalar.
        rows, steps, columns: booleans along the first, the second and the last axis. True if an
            element there is not finite. Missing axes have size 0.
        values: the tensor itself, if requested.
        vectors: booleans along all axes except the last. True if no element of a vector is finite.
            All are False if some vector has both finite and non-finite elements.
        lows, highs: the smallest and the largest element of each vector, of the same shape.
        column_lows, column_highs: the smallest and the largest element at each position of the last
            axis, over all vectors.
        step_sizes: for a recurrent layer, the largest absolute state at each time step. Only finite
            elements count, in the examples that are not finite at the first bad time step.
    """

    summary: Summary
    low: Any
    high: Any
    width: Any
    rows: Any
    steps: Any
    columns: Any
    values: Any = ()
    vectors: Any = ()
    lows: Any = ()
    highs: Any = ()
    column_lows: Any = ()
    column_highs: Any = ()
    step_sizes: Any = ()

    def numbers(self) -> Detail:
        """Returns the same measurement as Python numbers and NumPy arrays."""
        return Detail(
            self.summary.numbers(),
            float(self.low),
            float(self.high),
            int(self.width),
            *(np.asarray(flags) for flags in self[4:]),
        )


class Measurement(NamedTuple):
    """Frame with its measurement."""

    frame: Frame
    detail: Detail

    @property
    def is_finite(self) -> bool:
        """Returns True if all elements are finite, and a learning rate is not negative."""
        if self.frame.kind == "learning rate" and self.detail.low < 0:
            return False
        return self.detail.summary.non_finite == 0


def measure_tensor(tensor: Any) -> Detail:
    """Measures a floating tensor in detail, or a `tf.IndexedSlices` as the tensor it stands for.

    Complex numbers are measured by their absolute values.
    """
    values = tf.convert_to_tensor(tensor)  # adds rows with the same index
    if values.dtype.is_complex:
        values = as_floating(values)
    return _traced(values.dtype, values.shape.rank or 0)(values)


@functools.cache
def _traced(dtype: tf.DType, rank: int) -> Callable[[tf.Tensor], Detail]:
    """Returns `_measure_values`, traced once for each dtype and rank, not for each tensor.

    A graph calls it and does not contain its operations. TensorFlow then prepares the graph of a
    step two to three times as fast, because a step has thousands of tensors.
    """
    return tf.function(
        _measure_values,
        input_signature=[tf.TensorSpec([None] * rank, dtype)],
        experimental_attributes={"_noinline": True},
    )


def _measure_values(values: tf.Tensor) -> Detail:
    good = tf.math.is_finite(values)
    wide = at_least_float32(values)
    rank = values.shape.rank or 0

    none = tf.zeros([0], tf.bool)

    def along(axis: int, least: int) -> tf.Tensor:
        if rank < least:
            return none
        return tf.reduce_any(~good, axis=[i for i in range(rank) if i != axis % rank])

    vectors, lows = none, tf.zeros([0], wide.dtype)
    highs = column_lows = column_highs = lows
    if rank >= 2:
        outer = list(range(rank - 1))
        column_lows, column_highs = tf.reduce_min(wide, outer), tf.reduce_max(wide, outer)
        some_bad, all_bad = tf.reduce_any(~good, -1), tf.reduce_all(~good, -1)
        vectors = some_bad & tf.reduce_all(some_bad == all_bad)
        lows, highs = tf.reduce_min(wide, -1), tf.reduce_max(wide, -1)

    infinite = tf.constant(np.inf, wide.dtype)
    return Detail(
        summarize(values),
        tf.reduce_min(tf.where(good, wide, infinite)),
        tf.reduce_max(tf.where(good, wide, -infinite)),
        tf.shape(values)[-1] if rank else tf.constant(0),
        along(0, 1),
        along(1, 3),
        along(-1, 2),
        vectors=vectors,
        lows=lows,
        highs=highs,
        column_lows=column_lows,
        column_highs=column_highs,
    )


def of_argument(detail: Detail, values: tf.Tensor) -> Detail:
    """Adds the values of an argument to its measurement, and the range of the wrong values.

    Args:
        detail: Measurement of a copy of the values with NaN in place of the wrong values.
        values: Tensor `[2, ...]`: the values, and this copy.
    """
    wrong = measure_tensor(tf.where(tf.math.is_nan(values[1]), values[0], math.nan))
    return detail._replace(low=wrong.low, high=wrong.high, values=values)


def of_states(detail: Detail, states: Any) -> Detail:
    """Adds the time steps of a recurrent layer to its measurement.

    Args:
        detail: Measurement of the layer's output.
        states: Tensor `[batch, time, ...]`. The outputs at all time steps.
    """
    states = tf.convert_to_tensor(states)
    rank = states.shape.rank or 0
    if rank < 3 or states.dtype.is_complex:
        return detail
    states = at_least_float32(states)
    inner = list(range(2, rank))
    bad = ~tf.reduce_all(tf.math.is_finite(states), inner)
    steps = tf.reduce_any(bad, 0)
    rows = tf.gather(bad, tf.argmax(tf.cast(steps, tf.int8)), axis=1)
    sizes = tf.where(tf.math.is_finite(states), tf.abs(states), tf.zeros_like(states))
    sizes = tf.where(rows[:, tf.newaxis], tf.reduce_max(sizes, inner), 0.0)
    return detail._replace(steps=steps, step_sizes=tf.reduce_max(sizes, 0))


PACKED = 11  # number of elements of the result of `packed`


def packed(tensor: Any, argument: tf.Tensor | None = None) -> tf.Tensor:
    """Returns a detailed measurement as a float64 vector, for a variable of fixed shape.

    `argument` is `values` of `of_argument`. With it, the range is the range of the wrong values.
    """
    detail = measure_tensor(tensor)
    if argument is not None:
        detail = of_argument(detail, argument)
    first = tf.constant(-1, tf.int64)
    if (tf.convert_to_tensor(tensor).shape.rank or 0) >= 3:
        first = tf.where(tf.reduce_any(detail.steps), tf.argmax(tf.cast(detail.steps, tf.int8)), -1)
    found = (*detail.summary, detail.low, detail.high, detail.width, first)
    return tf.stack([tf.cast(one, tf.float64) for one in found])


def unpacked(numbers: np.ndarray) -> Detail:
    """Returns the measurement in a `packed` vector, without rows and columns.

    `steps` marks only the first non-finite time step.
    """
    first, none = int(numbers[10]), np.zeros(0, bool)
    steps = np.arange(first + 1) == first
    summary = Summary(*numbers[:7]).numbers()
    low, high = numbers[7:9].tolist()
    found = Detail(summary, low, high, int(numbers[9]), none, steps, none, vectors=none)
    unknown = np.zeros(0)
    return found._replace(lows=unknown, highs=unknown, column_lows=unknown, column_highs=unknown)


def positions_text(flags: Any, most: int = 5) -> str:
    """Returns the first positions that are True as text, as "3, 7, 8 and 12 others"."""
    found = np.flatnonzero(flags)
    shown = ", ".join(str(int(place)) for place in found[:most])
    rest = len(found) - most
    return shown if rest <= 0 else f"{shown} and {rest} other{'s' * (rest > 1)}"


def whole_columns(detail: Detail) -> np.ndarray:
    """Returns the columns without a finite element; none if a column has finite ones too."""
    bad, found = detail.columns, detail.summary
    if found.non_finite * len(bad) == found.size * bad.sum():
        return bad
    return np.zeros(len(bad), bool)


def columns_text(flags: Any) -> str:
    """Returns columns as text, as "columns 3, 7"."""
    return f"column{'s' if np.count_nonzero(flags) > 1 else ''} {positions_text(flags)}"


def rows_text(flags: Any, of: str = "batch") -> str:
    """Returns rows as text, as "rows 3, 7 of the batch"."""
    return f"row{'s' if np.count_nonzero(flags) > 1 else ''} {positions_text(flags)} of the {of}"
