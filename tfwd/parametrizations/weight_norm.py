"""`WeightNorm`: weight normalization."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import dtypes
from tfwd.parametrizations.base import Parametrization


@keras.saving.register_keras_serializable("tfwd")
class WeightNorm(Parametrization):
    """Weight normalization without a gain: every slice along `axis` has unit Euclidean length.

    Formula: `w'_k = w_k / max(||w_k||, epsilon)` for each index `k` of `axis`, with the norm over
    all other axes. It is deterministic, and acts in training and in evaluation.

    Args:
        axis: int. Axis of the output features, which are normalized separately. Default -1.
        epsilon: float. Smallest divisor. Default 1e-6.

    Example:
        >>> w = WeightNorm()(tf.constant([[3.0], [4.0]]), seed=None)
        >>> [round(float(entry), 2) for entry in w.numpy().ravel()]
        [0.6, 0.8]

    References: Salimans and Kingma, "Weight Normalization" (2016). The published gain `g` would be
    a new weight, which a parametrization does not add; a gain that is wanted can follow as a layer.
    """

    stochastic = False

    def __init__(self, axis: int = -1, *, epsilon: float = 1e-6) -> None:
        self.axis = axis
        self.epsilon = epsilon

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor | None = None) -> tf.Tensor:
        self.check("WeightNorm", tuple(weight.shape))
        rank = len(weight.shape)
        others = [axis for axis in range(rank) if axis != self.axis % rank]
        wide = dtypes.wide(weight.dtype)
        squares = tf.reduce_sum(tf.square(tf.cast(weight, wide)), others, keepdims=True)
        # The root comes after the maximum, because its slope at zero is infinite.
        scale = tf.math.rsqrt(tf.maximum(squares, tf.cast(self.epsilon, wide) ** 2))
        return tf.cast(tf.cast(weight, wide) * scale, weight.dtype)

    def check(self, where: str, shape: tuple[int, ...] | None = None) -> None:
        if shape is not None and not -len(shape) <= self.axis < len(shape):
            raise ValueError(
                f"{where}: axis {self.axis} does not exist in a weight of shape {shape}"
            )

    def get_config(self) -> dict[str, Any]:
        return {"axis": self.axis, "epsilon": self.epsilon}
