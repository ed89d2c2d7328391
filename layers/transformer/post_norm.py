"""`PostNormLayer`: base class of layers that normalize after each residual connection."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd.layers.transformer import composite
from tfwd.layers.transformer.activations import activation as activation_of
from tfwd.layers.transformer.attention import MultiHeadAttention
from tfwd.layers.transformer.composite import Composite, built


class PostNormLayer(Composite):
    """Base class of `TransformerLayer` and `Connection`: attention and two products.

    The two differ only in the attention. A subclass calls `add_parts` in its constructor.
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
        self.initializer = composite.initializer(initializer)
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
