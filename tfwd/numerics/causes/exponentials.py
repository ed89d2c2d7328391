"""Limit above which the exponential of a tensor is infinite."""

from __future__ import annotations

import math

import tensorflow as tf

from tfwd.numerics.report import Measurement


def exp_limit(found: Measurement) -> float:
    """Returns the logarithm of the dtype's largest number: 88.7 for float32."""
    dtype = tf.as_dtype(found.frame.dtype)
    return math.log(float(dtype.max)) if dtype.is_floating else math.log(float(tf.float32.max))


def is_beyond_exp(found: Measurement) -> bool:
    """Returns True if the exponential of an element is infinite."""
    return found.detail.high > exp_limit(found)
