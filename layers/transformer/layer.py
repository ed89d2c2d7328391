"""`TransformerLayer`: self-attention and two products, each with a residual connection."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd.layers.transformer.attention import SelfAttention
from tfwd.layers.transformer.composite import built
from tfwd.layers.transformer.inputs import position_mask
from tfwd.layers.transformer.post_norm import PostNormLayer


@keras.saving.register_keras_serializable("tfwd.transformer")
class TransformerLayer(PostNormLayer):
    """An encoder layer that normalizes after each residual connection, as in BERT.

    Formula:

        a = LayerNorm(x + dropout(attention(x)))
        y = LayerNorm(a + dropout(f(a W_1 + b_1) W_2 + b_2))

    Args:
        num_heads: int. Number of heads.
        hidden_size: int. Width of input and output, a multiple of `num_heads`.
        intermediate_size: int. Width between the two products.
        activation: str. The function f: a name from published configs, or from Keras. "gelu" is
            exact, and "gelu_new" uses tanh. "leaky_relu" has slope 0.01. Default "gelu".
        dropout: float. Rate of the two dropouts. Default 0.
        attention_dropout: float. Dropout rate of attention weights. Default 0.
        epsilon: float. Epsilon of the normalizations. Default 1e-12.
        initializer: Initializer of the kernels. A float is the standard deviation of a truncated
            normal distribution. Default 0.02.
        **kwargs: Arguments of every Keras layer, such as `name`.

    Call: `layer(x, mask=None, training=None)`. `x` and the output are
    `[batch, length, hidden_size]`. `mask` is as in `SelfAttention`.

    Sublayers: `attention`, `attention_LayerNorm`, `intermediate`, `output` and `LayerNorm`.

    Raises:
        ValueError: If a size is not positive, or if `num_heads` does not divide `hidden_size`.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.layers import transformer as T
        >>> layer = T.TransformerLayer(num_heads=2, hidden_size=8, intermediate_size=16)
        >>> layer(tf.ones([3, 5, 8])).shape
        TensorShape([3, 5, 8])

    References: Vaswani et al., "Attention Is All You Need" (2017); Devlin et al., "BERT" (2019).
    """

    def __init__(
        self,
        num_heads: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "gelu",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        epsilon: float = 1e-12,
        initializer: Any = 0.02,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if num_heads < 1 or hidden_size % num_heads:
            raise ValueError(
                f"TransformerLayer '{self.name}': num_heads={num_heads} does not divide "
                f"hidden_size={hidden_size}; choose a divisor"
            )
        self.add_parts(
            SelfAttention,
            num_heads,
            hidden_size // num_heads,
            hidden_size,
            intermediate_size,
            activation,
            dropout,
            attention_dropout,
            epsilon,
            initializer,
        )

    def build(self, input_shape: Any) -> None:
        built(self.attention, *input_shape)
        self.build_after_attention(input_shape)

    def call(self, inputs: tf.Tensor, mask: Any = None, training: Any = None) -> tf.Tensor:
        attended = self.attention(inputs, mask=mask, training=training)
        return self.after_attention(inputs, attended, training)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Returns the mask of positions, or None."""
        return position_mask(mask)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape
