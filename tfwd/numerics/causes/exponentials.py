"""From where on the exponential of a tensor is infinite."""

from __future__ import annotations

import math

import tensorflow as tf

from tfwd.numerics.report import Found


def exp_limit(found: Found) -> float:
    """The logarithm of the largest number of the tensor's dtype: 88.7 for float32."""
    dtype = tf.as_dtype(found.frame.dtype)
    return math.log(float(dtype.max)) if dtype.is_floating else math.log(float(tf.float32.max))


def is_beyond_exp(found: Found) -> bool:
    """Whether the exponential of an element is infinite."""
    return found.detail.high > exp_limit(found)
