"""Rules for normalizations whose examples are independent: `z = gamma xhat + beta`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd.dtypes import at_least_float32
from tfwd.gradients.gradient_forms import Materialized, size
from tfwd.gradients.recorded_pass import Call
from tfwd.gradients.rules.registry import rule


def _normalization_rule(
    layer: Any,
    call: Call,
    inputs: tf.Tensor,
    gamma: Any,
    beta: Any,
    axes: Sequence[int],
) -> Any:
    """Computes a normalization with gamma and beta.

    gamma gets `xhat d` and beta gets `d`, summed over all axes except the batch axis and their own.
    """
    if 0 in axes:
        return NotImplemented  # it normalizes over the examples, or has a factor per example
    values = []
    if gamma is not None:
        values.append((gamma, tf.ones(gamma.shape, gamma.dtype)))
    if beta is not None:
        values.append((beta, tf.zeros(beta.shape, beta.dtype)))
    normalized = call.original(inputs, values=values)
    shape = [1] * inputs.shape.rank
    for axis in axes:
        shape[axis] = inputs.shape[axis]
    z = at_least_float32(normalized)
    if gamma is not None:
        z = z * tf.reshape(at_least_float32(call.value(gamma)), shape)
    if beta is not None:
        z = z + tf.reshape(at_least_float32(call.value(beta)), shape)
    z = call.probe(tf.cast(z, normalized.dtype))
    summed = [axis for axis in range(1, inputs.shape.rank) if axis not in axes]

    def given(product: tf.Tensor, variable: Any) -> Materialized:
        return Materialized(
            tf.reshape(tf.reduce_sum(product, summed), [size(product, 0), *variable.shape])
        )

    call.use(gamma, z, lambda d: given(at_least_float32(d) * at_least_float32(normalized), gamma))
    call.use(beta, z, lambda d: given(at_least_float32(d), beta))
    return z


def _axes(axis: Any, rank: int) -> list[int]:
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    return sorted(a % rank for a in axes)


@rule(keras.layers.LayerNormalization)
def layer_normalization(layer: Any, call: Call, inputs: tf.Tensor) -> Any:
    """Computes LayerNormalization, over the features of a position."""
    axes = _axes(layer.axis, inputs.shape.rank)
    return _normalization_rule(layer, call, inputs, layer.gamma, layer.beta, axes)


@rule(keras.layers.GroupNormalization)
def group_normalization(layer: Any, call: Call, inputs: tf.Tensor) -> Any:
    """Computes GroupNormalization, over all positions of a group of channels."""
    gamma = layer.gamma if layer.scale else None
    beta = layer.beta if layer.center else None
    return _normalization_rule(
        layer, call, inputs, gamma, beta, _axes(layer.axis, inputs.shape.rank)
    )


@rule(*[cls for cls in (getattr(keras.layers, "RMSNormalization", None),) if cls])
def rms_normalization(layer: Any, call: Call, x: tf.Tensor) -> Any:
    """Computes RMSNormalization, by the root of the mean square, without a beta."""
    return _normalization_rule(layer, call, x, layer.scale, None, _axes(layer.axis, x.shape.rank))
