"""`Pooler`: one vector per sequence, computed from its first position."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd.layers.transformer import composite_layer
from tfwd.layers.transformer.composite_layer import built
from tfwd.layers.transformer.formats.published_layer import Published


@keras.saving.register_keras_serializable("tfwd.transformer")
class Pooler(Published):
    """A dense layer on the first position of a sequence, as in BERT.

    Formula: `y = tanh(x[:, 0] W + b)`.

    Args:
        hidden_size: int. Width of input and output.
        initializer: Initializer of the kernel. A float is the standard deviation of a truncated
            normal distribution. Default 0.02.
        **kwargs: Arguments of every Keras layer, such as `name`.

    Input: `[batch, length, hidden_size]`. Output: `[batch, hidden_size]`. Sublayer: `dense`.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.layers import transformer as T
        >>> T.Pooler(8)(tf.ones([2, 5, 8])).shape
        TensorShape([2, 8])

    References: Devlin et al., "BERT" (2019).
    """

    part = "pooler"

    def __init__(self, hidden_size: int, initializer: Any = 0.02, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden_size = hidden_size
        self.initializer = composite_layer.initializer(initializer)
        self.product = self.dense(hidden_size, "dense")

    def build(self, input_shape: Any) -> None:
        built(self.product, input_shape[0], input_shape[-1])
        self.built = True

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.tanh(self.product(inputs[:, 0]))

    def compute_mask(self, inputs: Any, mask: Any = None) -> None:
        """Returns None: the output has no positions to mask."""

    def compute_output_shape(self, input_shape: Any) -> tuple:
        return (input_shape[0], self.hidden_size)
