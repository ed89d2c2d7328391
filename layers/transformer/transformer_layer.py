"""`TransformerLayer`: self-attention and two dense layers, with residual connections.

`PostNormLayer` is the base class of both `TransformerLayer` and `Connection`.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd.layers.transformer import composite_layer
from tfwd.layers.transformer.activations import activation as activation_of
from tfwd.layers.transformer.attention import MultiHeadAttention, SelfAttention
from tfwd.layers.transformer.composite_layer import Composite, built
from tfwd.layers.transformer.position_mask import position_mask


class PostNormLayer(Composite):
    """Base class of `TransformerLayer` and `Connection`: attention and two dense layers.

    The two classes differ only in the attention. A subclass calls `add_parts` in its constructor.
    """

    def add_parts(
        self,
        attention: type[MultiHeadAttention],
        num_heads: int,
        head_size: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        dropout: float,
        attention_dropout: float,
        epsilon: float,
        initializer: Any,
    ) -> None:
        """Stores the arguments and creates the sublayers.

        Args:
            attention: Class of the attention.
            num_heads, head_size: As in `Attention`.
            hidden_size, intermediate_size, activation, dropout, attention_dropout, epsilon,
                initializer: As in `TransformerLayer`.
        """
        self.num_heads = num_heads
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = activation
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.epsilon = epsilon
        self.initializer = composite_layer.initializer(initializer)
        self._function = activation_of(activation)
        self.attention = self.inner(
            attention,
            num_heads,
            head_size,
            hidden_size,
            dropout=attention_dropout,
            initializer=self.initializer,
            name="attention",
        )
        self.attention_norm = self.norm("attention_LayerNorm")
        self.intermediate = self.dense(intermediate_size, "intermediate")
        self.output_dense = self.dense(hidden_size, "output")
        self.output_norm = self.norm("LayerNorm")
        self.dropped = self.inner(keras.layers.Dropout, dropout, name="dropout")

    def build_after_attention(self, shape: Any) -> None:
        """Builds the sublayers except the attention, for inputs of a shape."""
        built(self.attention_norm, *shape)
        built(self.intermediate, *shape)
        built(self.output_dense, *shape[:-1], self.intermediate_size)
        built(self.output_norm, *shape)
        self.built = True

    def after_attention(self, inputs: tf.Tensor, attended: tf.Tensor, training: Any) -> tf.Tensor:
        """Computes the layer's output from its input and the output of the attention."""
        attended = self.attention_norm(inputs + self.dropped(attended, training=training))
        outputs = self.output_dense(self._function(self.intermediate(attended)))
        return self.output_norm(attended + self.dropped(outputs, training=training))


@keras.saving.register_keras_serializable("tfwd.transformer")
class TransformerLayer(PostNormLayer):
    """An encoder layer that normalizes after each residual connection, as in BERT.

    Formula:

        a = LayerNorm(x + dropout(attention(x)))
        y = LayerNorm(a + dropout(f(a W_1 + b_1) W_2 + b_2))

    Args:
        num_heads: int. Number of heads.
        hidden_size: int. Width of input and output, a multiple of `num_heads`.
        intermediate_size: int. Width between the two dense layers.
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
                f"hidden_size={hidden_size}: choose a positive divisor"
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
