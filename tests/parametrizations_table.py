"""Table with one row for each parametrization, or for each option that changes its result."""

from typing import Any

import tensorflow as tf

from tfwd import parametrizations as P

# Parametrizations whose gradient is not the derivative of their formula, such as straight-through
# rounding. They have a test of their own; finite differences are for the others.
SURROGATE: list[P.Parametrization] = [P.GaussianNoise(0.3, scale="deviation")]
ALL = [
    P.Dropout(0.5),
    P.Dropout(0.25, noise_shape=(None, 1)),
    P.GaussianNoise(0.3),
    P.GaussianNoise(0.3, start_call=2),
    P.Mixout(0.5),
    P.Mixout(0.25, noise_shape=(None, 1), reference_dtype="bfloat16"),
    P.WeightNorm(),
    P.WeightNorm(axis=0, epsilon=1e-3),
    P.WeightNorm(gain=True),
    P.Chain([P.GaussianNoise(0.3), P.Dropout(0.5)]),
    P.Chain([P.Chain([P.Dropout(0.5)]), P.WeightNorm()]),
    *SURROGATE,
]


def in_call(p: P.Parametrization, weight: tf.Tensor, places: Any = None) -> P.Parametrization:
    """Returns the parametrization of call number 5, with the facts that a layer tells it.

    Args:
        p: a parametrization of the table.
        weight: the raw weight.
        places: indices of the rows to compute. None: all rows.
    """
    p = p.at(tf.constant(5, tf.int64)).of_weight(weight)
    if not p.has_reference:
        return p
    if p.trains_reference:
        return p.towards_tensor(0.1 + 0.7 * p.first_reference(weight))
    reference = 0.5 - 2 * weight
    return p.towards_tensor(reference if places is None else tf.gather(reference, places))
