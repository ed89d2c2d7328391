"""`WeightNorm`: weight normalization."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import dtypes
from tfwd.parametrizations.base import Parametrization, copy_with


@keras.saving.register_keras_serializable("tfwd")
class WeightNorm(Parametrization):
    """Weight normalization: the length and the direction of a weight's slices are separate.

    Formula: `w'_k = g_k w_k / max(||w_k||, epsilon)` for each index `k` of `axis`, with the norm
    over all other axes. Without a gain `g_k` is 1, so every slice has unit Euclidean length. It is
    deterministic, and acts in training and in evaluation.

    With `gain=True` the layer that applies it gets `g` as a trainable weight of shape
    `[weight.shape[axis]]`, in the weight's dtype. Its name is the weight's name followed by
    `_gain`. It comes after the wrapped layer's weights, and it is saved and loaded with them. It is
    trained even if the wrapped layer is frozen. Only a frozen wrapper freezes it. It is created
    together with the weights, with the value `g_k = max(||w_k||, epsilon)`. So the layer's outputs
    do not change. If the weights are loaded later without the gain, call
    `tfwd.reset_references(model)`, which sets the gain again. `tfwd.pretrained` makes this call
    itself. Backward does not store `w'`.

    `tfwd.unwrap(model, fold=True)` returns plain layers that have `w'` as their weight.

    Args:
        axis: int. Axis of the output features, which are normalized separately. Default -1.
        gain: bool. Adds the trainable gain. Default False, which adds no weight.
        epsilon: float. Smallest divisor. Default 1e-6.

    Raises:
        ValueError: On application, if the weight does not have the axis.

    Example:
        >>> import keras, tensorflow as tf
        >>> from tfwd.parametrizations import WeightNorm
        >>> w = WeightNorm()(tf.constant([[3.0], [4.0]]), seed=None)
        >>> [round(float(entry), 2) for entry in w.numpy().ravel()]
        [0.6, 0.8]
        >>> from tfwd import layers
        >>> norm = {"kernel": WeightNorm(gain=True)}
        >>> dense = layers.Parametrized(keras.layers.Dense(2), norm)
        >>> dense.build((None, 3))
        >>> [tuple(w.shape) for w in dense.weights]
        [(3, 2), (2,), (2,)]

    References: Salimans and Kingma, "Weight Normalization" (2016). Departure: the paper also
    proposes to initialize gain and bias from a batch of data; tfwd does not change the initial
    outputs.
    """

    stochastic = False

    def __init__(self, axis: int = -1, *, gain: bool = False, epsilon: float = 1e-6) -> None:
        self.axis = axis
        self.gain = bool(gain)
        self.epsilon = epsilon
        self._gain: tf.Tensor | None = None  # set for one call by `towards_tensor`

    @property
    def has_reference(self) -> bool:  # type: ignore[override]
        """True if there is a gain, which is a tensor that the layer holds."""
        return self.gain

    @property
    def trains_reference(self) -> bool:  # type: ignore[override]
        """True if there is a gain."""
        return self.gain

    def towards_tensor(self, reference: tf.Tensor) -> WeightNorm:
        return copy_with(self, _gain=reference)

    def first_reference(self, weight: tf.Tensor) -> tf.Tensor:
        norms = tf.sqrt(self._squares(weight))
        return tf.cast(tf.reshape(norms, [weight.shape[self.axis]]), weight.dtype)

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor | None = None) -> tf.Tensor:
        self.check("WeightNorm", tuple(weight.shape))
        # The root comes after the maximum, because its slope at zero is infinite.
        squares = self._squares(weight)
        scale = tf.math.rsqrt(squares)
        if self.gain:
            if self._gain is None:
                raise ValueError(
                    f"{self!r} has no gain tensor: a layer that applies it sets the gain; without "
                    "a layer, call WeightNorm(gain=True).towards_tensor(gain)"
                )
            scale *= tf.reshape(tf.cast(self._gain, scale.dtype), scale.shape)
        return tf.cast(tf.cast(weight, scale.dtype) * scale, weight.dtype)

    def _squares(self, weight: tf.Tensor) -> tf.Tensor:
        """Returns the squared divisors, with axes of size one."""
        rank = len(weight.shape)
        others = [axis for axis in range(rank) if axis != self.axis % rank]
        wide = dtypes.wide(weight.dtype)
        squares = tf.reduce_sum(tf.square(tf.cast(weight, wide)), others, keepdims=True)
        return tf.maximum(squares, tf.cast(self.epsilon, wide) ** 2)

    def check(self, where: str, shape: tuple[int, ...] | None = None) -> None:
        if shape is not None and not -len(shape) <= self.axis < len(shape):
            raise ValueError(
                f"{where}: axis {self.axis} does not exist in a weight of shape {shape}; expected "
                f"an axis from {-len(shape)} to {len(shape) - 1}"
            )

    def get_config(self) -> dict[str, Any]:
        return {"axis": self.axis, "gain": self.gain, "epsilon": self.epsilon}

    def __repr__(self) -> str:
        gain = ", gain=True" if self.gain else ""
        return f"WeightNorm(axis={self.axis!r}{gain}, epsilon={self.epsilon!r})"
