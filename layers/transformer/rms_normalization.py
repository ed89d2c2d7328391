"""`RMSNormalization`: normalization by the root mean square, as in T5."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd.layers.transformer.composite_layer import Composite


@keras.saving.register_keras_serializable("tfwd.transformer")
class RMSNormalization(Composite):
    """Normalization by the root mean square of the last axis, without subtracting the mean.

    Formula: `y = s x / sqrt(mean(x^2) + epsilon)`, computed in float32 at least.

    Args:
        epsilon: float. Added to the mean square. Default 1e-6.
        **kwargs: Arguments of every Keras layer, such as `name`.

    Input and output: `[..., features]`. Its weight is `scale`, `[features]`, initially ones.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.layers import transformer as T
        >>> T.RMSNormalization()(tf.constant([[3.0, 4.0]])).numpy().round(2).tolist()
        [[0.8500000238418579, 1.1299999952316284]]

    References: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). Keras has a layer
    of this name from version 3.9 on.
    """

    def __init__(self, epsilon: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.epsilon = epsilon
        self.scale_initializer = keras.initializers.get("ones")
        self.scale: Any = None

    def build(self, input_shape: Any) -> None:
        self.scale = self.add_weight(
            shape=(input_shape[-1],), initializer=self.scale_initializer, name="scale"
        )
        self.built = True

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        wide = inputs.dtype if inputs.dtype == tf.float64 else tf.float32
        values = tf.cast(inputs, wide)
        mean = tf.reduce_mean(tf.square(values), axis=-1, keepdims=True)
        normal = tf.cast(values * tf.math.rsqrt(mean + self.epsilon), inputs.dtype)
        return normal * tf.cast(tf.convert_to_tensor(self.scale), inputs.dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape
