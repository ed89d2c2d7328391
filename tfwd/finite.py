"""What is finite in a tensor: in one number, and in a summary of counts.

These run in eager mode, in graphs and under XLA alike. `tf.debugging.check_numerics` and `Assert`
do not: XLA leaves them out without a word. Nor does XLA's `reduce_max` on a CPU keep a NaN.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfwd._graph import graphs
from tfwd.dtypes import at_least_float32

SQUARED_IS_FINITE = 1e15  # up to here the square of a number is a float32 by far

# `watch`: what looks at the tensors of the step that the present thread runs.
here = threading.local()


def is_watching() -> bool:
    """Whether something looks at all layers of the step that the present thread runs."""
    return getattr(here, "watch", None) is not None


class Summary(NamedTuple):
    """What is in a tensor.

    Attributes:
        size: the number of elements.
        nan, positive_inf, negative_inf: how many of them are NaN, +Inf and -Inf.
        zeros: how many are 0.
        abs_min: the smallest absolute value that is finite and not 0; 0 if there is none.
        abs_max: the largest absolute value that is finite; 0 if there is none.

    They are int64 scalars, but for the last two, which are in the tensor's dtype, float32 at least;
    `numbers()` has Python's numbers in their place.
    """

    size: Any
    nan: Any
    positive_inf: Any
    negative_inf: Any
    zeros: Any
    abs_min: Any
    abs_max: Any

    def numbers(self) -> Summary:
        """The same with Python's numbers."""
        counts = [int(value) for value in self[:5]]
        return Summary(*counts, *(float(value) for value in self[5:]))

    @property
    def non_finite(self) -> Any:
        """How many elements are NaN or infinite."""
        return self.nan + self.positive_inf + self.negative_inf

    @property
    def percent(self) -> float:
        """How many of a hundred elements are NaN or infinite."""
        return 100.0 * float(self.non_finite) / max(float(self.size), 1.0)

    def __str__(self) -> str:
        """The counts in words, as Caffe reports them."""
        numbers = self.numbers()
        share = f"{numbers.percent:.2f}"
        if numbers.non_finite and share == "0.00":
            share = f"{numbers.percent:.2g}"
        return (
            f"{share} % non-finite elements ({numbers.nan} NaN, {numbers.positive_inf} +Inf, "
            f"{numbers.negative_inf} -Inf of {numbers.size})"
        )


def summarize(tensor: Any) -> Summary:
    """Counts what is not finite in a tensor, and finds how small and how large the rest is.

    Args:
        tensor: of any shape and numeric dtype, or a `tf.IndexedSlices`, whose rows count. A complex
            number counts as NaN if a part of it is, else as +Inf if a part is infinite.

    Returns:
        A `Summary` of tensors, in eager mode, in graphs and under XLA.

    Raises:
        TypeError: it is not numeric.

    Example:

    >>> summary = summarize(tf.constant([0.0, float("nan"), float("inf"), -2.0])).numbers()
    >>> summary.nan, summary.positive_inf, summary.zeros, summary.abs_max
    (1, 1, 1, 2.0)
    >>> print(summary)
    50.00 % non-finite elements (1 NaN, 1 +Inf, 0 -Inf of 4)
    """
    tensor = _values(tensor)
    size = tf.size(tensor, tf.int64)
    if not tensor.dtype.is_floating:
        tensor = _as_floating(tensor)
    nan, infinite = tf.math.is_nan(tensor), tf.math.is_inf(tensor)
    magnitude = at_least_float32(tf.abs(tensor))
    finite = ~(nan | infinite)
    largest = tf.reduce_max(tf.where(finite, magnitude, 0.0))
    counted = finite & (tensor != 0)
    smallest = tf.reduce_min(tf.where(counted, magnitude, magnitude.dtype.max))
    any_counted = tf.reduce_any(counted)
    return Summary(
        size,
        _count(nan),
        _count(infinite & (tensor > 0)),
        _count(infinite & (tensor < 0)),
        _count(tensor == 0),
        tf.where(any_counted, smallest, tf.zeros_like(smallest)),
        tf.where(any_counted, largest, tf.zeros_like(largest)),
    )


def extent(tensor: Any) -> tf.Tensor:
    """How large a tensor is, as cheaply as it can be told: not finite if an element is not.

    It is the root of the sum of squares, or under XLA the largest absolute sum of a row, which are
    the fastest where they are taken. Either can overflow though all elements are finite, if these
    are beyond 10^15: whoever finds an extent that is not finite looks closer.

    Args:
        tensor: floating or complex, of any shape, or a `tf.IndexedSlices`.

    Returns:
        A float32 scalar, or float64 for float64.
    """
    return extent_of(probe(tensor))


def probe(tensor: Any) -> tf.Tensor:
    """A number of a tensor that is not finite if an element is not; `extent_of` makes its extent.

    So a step computes one operation for each tensor, and the rest once for all of them.
    """
    tensor = at_least_float32(_real(_values(tensor)))
    if not graphs.in_xla():
        return tf.nn.l2_loss(tensor)
    # (XLA's maximum may lose a NaN, so there is none where it is asked for.)
    width = tensor.shape[-1] if tensor.shape.rank else None
    sums = tf.reduce_sum(tensor, axis=-1 if width is not None and width >= 8 else None)
    largest = tf.reduce_max(tf.where(tf.math.is_finite(sums), tf.abs(sums), math.inf))
    return tf.maximum(largest, 0.0)  # of nothing it is -Inf


def extent_of(probes: tf.Tensor) -> tf.Tensor:
    """The extents of tensors whose `probe` these are, in the same function."""
    return probes if graphs.in_xla() else tf.sqrt(2.0 * probes)


def largest(tensor: Any) -> tf.Tensor:
    """The largest absolute value that is finite, of floating numbers; a float32, or a float64."""
    magnitude = at_least_float32(tf.abs(_values(tensor)))
    found = tf.reduce_max(tf.where(tf.math.is_finite(magnitude), magnitude, 0.0))
    return tf.maximum(found, 0.0)  # of nothing it is -Inf


def can_be_non_finite(value: Any) -> bool:
    """Whether it is a tensor whose elements can be other than finite."""
    if isinstance(value, tf.IndexedSlices):
        value = value.values
    return isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_complex)


def all_finite(tensors: Sequence[Any]) -> tf.Tensor:
    """Whether all elements of all floating and complex tensors are finite: a boolean scalar.

    The sum of a tensor is finite only if all of its elements are, and costs one pass. If it is
    not, a finite tensor may be so large that its sum is not; only then the elements are looked at.
    """
    tensors = [_real(_values(tensor)) for tensor in tensors if can_be_non_finite(tensor)]
    if not tensors:
        return tf.constant(True)
    sums = tf.stack([tf.reduce_sum(at_least_float32(t), name="probe") for t in _one_dtype(tensors)])

    def closely() -> tf.Tensor:
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(t)) for t in tensors])

    return tf.cond(tf.reduce_all(tf.math.is_finite(sums)), lambda: tf.constant(True), closely)


def _one_dtype(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    double = any(tensor.dtype == tf.float64 for tensor in tensors)
    return [tf.cast(t, tf.float64) for t in tensors] if double else tensors


def _values(tensor: Any) -> tf.Tensor:
    return tensor.values if isinstance(tensor, tf.IndexedSlices) else tf.convert_to_tensor(tensor)


def _real(tensor: tf.Tensor) -> tf.Tensor:
    """A complex tensor as one of its parts, any other as it is."""
    if not tensor.dtype.is_complex:
        return tensor
    return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)])


def _as_floating(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype.is_complex:
        parts = _real(tensor)
        nan = tf.reduce_any(tf.math.is_nan(parts), axis=0)
        infinite = tf.reduce_any(tf.math.is_inf(parts), axis=0)
        # The absolute value of a finite number may be beyond the largest one.
        magnitude = tf.minimum(tf.abs(tensor), parts.dtype.max)
        magnitude = tf.where(infinite, tf.constant(math.inf, parts.dtype), magnitude)
        return tf.where(nan, tf.constant(math.nan, parts.dtype), magnitude)
    if tensor.dtype.is_integer or tensor.dtype.is_bool:
        return tf.cast(tensor, tf.float64)
    raise TypeError(f"summarize() needs a numeric tensor, got one of dtype {tensor.dtype.name}")


def _count(where: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(where, tf.int64))
