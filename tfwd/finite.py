"""Checks if tensors are finite: as one number, or as a summary of counts.

The functions work in eager mode, in graphs and under XLA. `tf.debugging.check_numerics` and
`Assert` do not work under XLA, because XLA silently removes them. XLA's `reduce_max` may lose a NaN
on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfwd._graph import private_graph_apis
from tfwd.dtypes import at_least_float32

SQUARED_IS_FINITE = 1e15  # the square of a smaller number is far below the limit of float32


class Summary(NamedTuple):
    """Counts of finite and non-finite elements of a tensor, and the range of its finite values.

    Attributes:
        size: Number of elements.
        nan, positive_inf, negative_inf: Numbers of elements that are NaN, +Inf and -Inf.
        zeros: Number of elements that are 0, or subnormal numbers of float32 or float64, which
            TensorFlow may treat as 0.
        abs_min: Smallest absolute value that is finite and not 0, or 0 if there is none.
        abs_max: Largest absolute value that is finite, or 0 if there is none.

    The counts are int64 scalars. `abs_min` and `abs_max` have the tensor's dtype, float32 at least.
    `numbers()` converts all of them to Python's numbers.
    """

    size: Any
    nan: Any
    positive_inf: Any
    negative_inf: Any
    zeros: Any
    abs_min: Any
    abs_max: Any

    def numbers(self) -> Summary:
        """Returns the same summary with Python's numbers."""
        counts = [int(value) for value in self[:5]]
        return Summary(*counts, *(float(value) for value in self[5:]))

    @property
    def non_finite(self) -> Any:
        """Number of elements that are NaN or infinite."""
        return self.nan + self.positive_inf + self.negative_inf

    @property
    def percent(self) -> float:
        """Percentage of elements that are NaN or infinite."""
        return 100.0 * float(self.non_finite) / max(float(self.size), 1.0)

    def __str__(self) -> str:
        """Formats the counts as Caffe reports them."""
        numbers = self.numbers()
        share = f"{numbers.percent:.2f}"
        if numbers.non_finite and share == "0.00":
            share = f"{numbers.percent:.2g}"
        return (
            f"{share} % non-finite elements ({numbers.nan} NaN, {numbers.positive_inf} +Inf, "
            f"{numbers.negative_inf} -Inf of {numbers.size})"
        )


def summarize(tensor: Any) -> Summary:
    """Counts the non-finite elements of a tensor, and finds the range of the finite elements.

    Args:
        tensor: Tensor of any shape and numeric dtype, or a `tf.IndexedSlices`, whose rows are
            counted. A complex number counts as NaN if one of its parts is NaN, else as +Inf if a
            part is infinite.

    Returns:
        A `Summary` of tensors, in eager mode, in graphs and under XLA.

    Raises:
        TypeError: If the tensor is not numeric.
        tf.errors.UnimplementedError: If TensorFlow cannot cast the dtype, such as int4.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.numerics import summarize
        >>> summary = summarize(tf.constant([0.0, float("nan"), float("inf"), -2.0])).numbers()
        >>> summary.nan, summary.positive_inf, summary.zeros, summary.abs_max
        (1, 1, 1, 2.0)
        >>> print(summary)
        50.00 % non-finite elements (1 NaN, 1 +Inf, 0 -Inf of 4)
    """
    tensor = _values(tensor)
    size = tf.size(tensor, tf.int64)
    if not tensor.dtype.is_floating:
        tensor = as_floating(tensor)
    if tensor.dtype.size == 1:  # TensorFlow has no tests of float8 numbers
        tensor = at_least_float32(tensor)
    nan, infinite = tf.math.is_nan(tensor), tf.math.is_inf(tensor)
    magnitude = at_least_float32(tf.abs(tensor))
    finite = ~(nan | infinite)
    largest = tf.reduce_max(tf.where(finite, magnitude, 0.0))
    # XLA compares subnormal numbers differently in different operations.
    is_zero = magnitude < np.finfo(magnitude.dtype.as_numpy_dtype).tiny
    counted = finite & ~is_zero
    smallest = tf.reduce_min(tf.where(counted, magnitude, magnitude.dtype.max))
    any_counted = tf.reduce_any(counted)
    return Summary(
        size,
        _count(nan),
        _count(infinite & (tensor > 0)),
        _count(infinite & (tensor < 0)),
        _count(is_zero),
        tf.where(any_counted, smallest, tf.zeros_like(smallest)),
        tf.where(any_counted, largest, tf.zeros_like(largest)),
    )


def extent(tensor: Any) -> tf.Tensor:
    """Measures the size of a tensor cheaply. The result is not finite if an element is not.

    It is the square root of the sum of squares. Under XLA, it is the largest absolute sum of a row.
    Each is the fastest measure in its mode. Both can overflow for finite elements beyond 10^15. So
    a caller must check the elements if the extent is not finite.

    Args:
        tensor: Floating or complex tensor of any shape, or a `tf.IndexedSlices`.

    Returns:
        A float32 scalar, or float64 for float64.
    """
    return extents_from_raw(raw_extent(tensor))


def raw_extent(tensor: Any) -> tf.Tensor:
    """Returns a number that is not finite if an element of a tensor is not finite.

    `extents_from_raw` converts this number to the tensor's extent. So a step runs one operation per
    tensor, and runs all others once for all tensors.
    """
    tensor = at_least_float32(_real(_values(tensor)))
    if not private_graph_apis.in_xla():
        return tf.nn.l2_loss(tensor)
    # XLA's maximum may lose a NaN, so NaN is replaced by infinity before the maximum.
    width = tensor.shape[-1] if tensor.shape.rank else None
    sums = tf.reduce_sum(tensor, axis=-1 if width is not None and width >= 8 else None)
    largest = tf.reduce_max(tf.where(tf.math.is_finite(sums), tf.abs(sums), math.inf))
    return tf.maximum(largest, 0.0)  # the maximum of an empty tensor is -Inf


def extents_from_raw(raw_extents: tf.Tensor) -> tf.Tensor:
    """Returns the extents of tensors from their `raw_extent`s, in the same function."""
    return raw_extents if private_graph_apis.in_xla() else tf.sqrt(2.0 * raw_extents)


def exact_extent(tensor: Any) -> tf.Tensor:
    """Returns the `extent` without its overflow: NaN only if an element is not finite."""
    values = at_least_float32(_real(_values(tensor)))
    scale = tf.reduce_max(tf.abs(values))  # -Inf for an empty tensor
    scale = tf.where(scale > 0.0, scale, 1.0)
    found = tf.minimum(scale * extent(values / scale), values.dtype.max)
    return tf.where(all_finite([tensor]), found, math.nan)


def largest(tensor: Any) -> tf.Tensor:
    """Returns the largest finite absolute value of a floating tensor, as float32 or float64.

    Rows of a `tf.IndexedSlices` with the same index are added first, as an optimizer adds them.
    """
    if isinstance(tensor, tf.IndexedSlices) and not private_graph_apis.in_xla():
        indices, places = tf.unique(tensor.indices)
        tensor = tf.math.unsorted_segment_sum(tensor.values, places, tf.size(indices))
    magnitude = at_least_float32(tf.abs(tf.convert_to_tensor(tensor)))
    found = tf.reduce_max(tf.where(tf.math.is_finite(magnitude), magnitude, 0.0))
    return tf.maximum(found, 0.0)  # the maximum of an empty tensor is -Inf


def can_be_non_finite(value: Any) -> bool:
    """Returns True for a tensor whose dtype has NaN and infinities."""
    if isinstance(value, tf.IndexedSlices):
        value = value.values
    return isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_complex)


def all_finite(tensors: Sequence[Any]) -> tf.Tensor:
    """Returns a boolean scalar: True if all elements of floating and complex tensors are finite.

    The sum of a tensor is finite only if all its elements are finite. A sum costs one pass. The sum
    of very large finite elements can overflow. So the elements are checked if a sum is not finite.
    """
    tensors = [_real(_values(tensor)) for tensor in tensors if can_be_non_finite(tensor)]
    if not tensors:
        return tf.constant(True)
    sums = tf.stack([tf.reduce_sum(at_least_float32(t), name="probe") for t in _one_dtype(tensors)])

    def check_elements() -> tf.Tensor:
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(t)) for t in tensors])

    finite_sums = tf.reduce_all(tf.math.is_finite(sums))
    return tf.cond(finite_sums, lambda: tf.constant(True), check_elements)


def _one_dtype(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    double = any(tensor.dtype == tf.float64 for tensor in tensors)
    return [tf.cast(t, tf.float64) for t in tensors] if double else tensors


def _values(tensor: Any) -> tf.Tensor:
    return tensor.values if isinstance(tensor, tf.IndexedSlices) else tf.convert_to_tensor(tensor)


def _real(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the parts of a complex tensor as one tensor, and any other tensor unchanged."""
    if not tensor.dtype.is_complex:
        return tensor
    return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)])


def as_floating(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the absolute values of complex numbers, and whole numbers as float64."""
    if tensor.dtype.is_complex:
        parts = _real(tensor)
        nan = tf.reduce_any(tf.math.is_nan(parts), axis=0)
        infinite = tf.reduce_any(tf.math.is_inf(parts), axis=0)
        # The absolute value of a finite complex number may exceed the largest number.
        magnitude = tf.minimum(tf.abs(tensor), parts.dtype.max)
        magnitude = tf.where(infinite, tf.constant(math.inf, parts.dtype), magnitude)
        return tf.where(nan, tf.constant(math.nan, parts.dtype), magnitude)
    if tensor.dtype.is_integer or tensor.dtype.is_bool:
        return tf.cast(tensor, tf.float64)
    raise TypeError(f"summarize() expects a numeric tensor, got dtype {tensor.dtype.name}")


def _count(where: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(where, tf.int64))
