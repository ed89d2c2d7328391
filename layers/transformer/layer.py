"""`TransformerLayer`: self-attention and two products, each with a residual connection."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd.layers.transformer import composite
from tfwd.layers.transformer.activations import activation as activation_of
from tfwd.layers.transformer.attention import SelfAttention
from tfwd.layers.transformer.composite import Composite, built
from tfwd.layers.transformer.inputs import of_places


@keras.saving.register_keras_serializable("tfwd.transformer")
class TransformerLayer(Composite):
    """A layer of an encoder that normalizes after each residual connection, as BERT's.

    Formula:

        a = LayerNorm(x + dropout(attention(x)))
        y = LayerNorm(a + dropout(f(a W_1 + b_1) W_2 + b_2))

    Args:
        num_heads: the number of heads.
        hidden_size: the width of input and output; `num_heads` divides it.
        intermediate_size: the width between the two products.
        activation: f: a name that configs of published models have ("gelu", which is exact;
            "gelu_new", which is made of tanh; "relu", "silu", "leaky_relu" of slope 0.01), or
            another one of Keras's.
        dropout: the rate of the two dropouts.
        attention_dropout: the rate at which attention weights are dropped.
        epsilon: the normalizations'.
        initializer: of the kernels; a float is the deviation of a truncated normal distribution.
        **kwargs: as for any layer.

    Call: `layer(x, mask=None, training=None)`; `x` and the output are `[batch, places,
    hidden_size]`, `mask` as in `SelfAttention`.

    The layers that it holds are `attention`, `attention_LayerNorm`, `intermediate`, `output` and
    `LayerNorm`.

    Raises:
        ValueError: a size is not positive, or `num_heads` does not divide `hidden_size`.

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
                f"hidden_size={hidden_size}"
            )
        self.num_heads = num_heads
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = activation
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.epsilon = epsilon
        self.initializer = composite.initializer(initializer)
        self._function = activation_of(activation)
        self.attention = self.inner(
            SelfAttention,
            num_heads,
            hidden_size // num_heads,
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

    def build(self, input_shape: Any) -> None:
        built(self.attention, *input_shape)
        built(self.attention_norm, *input_shape)
        built(self.intermediate, *input_shape)
        built(self.output_dense, *input_shape[:-1], self.intermediate_size)
        built(self.output_norm, *input_shape)
        self.built = True

    def call(self, inputs: tf.Tensor, mask: Any = None, training: Any = None) -> tf.Tensor:
        attended = self.attention(inputs, mask=mask, training=training)
        attended = self.attention_norm(inputs + self.dropped(attended, training=training))
        outputs = self.output_dense(self._function(self.intermediate(attended)))
        return self.output_norm(attended + self.dropped(outputs, training=training))

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """The mask of places, if there is one."""
        return of_places(mask)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape
