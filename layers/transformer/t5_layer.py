"""`T5Layer`: a layer of T5's encoder or decoder, which normalizes before each part."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers.transformer import composite_layer
from tfwd.layers.transformer.activations import activation as activation_of
from tfwd.layers.transformer.attention import Attention, MultiHeadAttention, SelfAttention
from tfwd.layers.transformer.composite_layer import Composite, built
from tfwd.layers.transformer.position_mask import position_mask
from tfwd.layers.transformer.rms_normalization import RMSNormalization


@keras.saving.register_keras_serializable("tfwd.transformer")
class T5Layer(Composite):
    """A layer of T5: self-attention, attention to a context in a decoder, and dense layers.

    Formula, with `n` for normalizations by the root mean square:

        a = x + dropout(attention(n(x)))                  with a position bias, and no scale
        c = a + dropout(attention(n(a), context))         in a decoder
        y = c + dropout(dropout(f(n(c) W_1) * n(c) W_2) W_3)

    The factor with `W_2` exists only if `gated` is True.

    Args:
        num_heads, head_size, hidden_size: As in `Attention`.
        intermediate_size: int. Width between the dense layers.
        is_decoder: bool. Adds attention to a context. Default False.
        activation: str. Name of the function f. Default "relu".
        gated: bool. Adds the factor with `W_2`. Default False.
        dropout: float. Rate of all dropouts. Default 0.
        epsilon: float. Epsilon of the normalizations. Default 1e-6.
        initializer: Initializer of the kernels. A float is the standard deviation of a truncated
            normal distribution. Default 0.05.
        **kwargs: Arguments of every Keras layer, such as `name`.

    Call: `layer(x, context=None, mask=None, context_mask=None, position_bias=None, training=None)`.

    Sublayers: `attention_norm`, `attention`, `context_norm`, `context_attention`, `norm`,
    `intermediate`, `gate` and `output`.

    References: Raffel et al., "Exploring the Limits of Transfer Learning" (2020); Shazeer, "GLU
    Variants Improve Transformer" (2020).
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        hidden_size: int,
        intermediate_size: int,
        is_decoder: bool = False,
        activation: str = "relu",
        gated: bool = False,
        dropout: float = 0.0,
        epsilon: float = 1e-6,
        initializer: Any = 0.05,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.head_size = head_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.is_decoder = is_decoder
        self.activation = activation
        self.gated = gated
        self.dropout = dropout
        self.epsilon = epsilon
        self.initializer = composite_layer.initializer(initializer)
        self._function = activation_of(activation)
        self.attention_norm = self._rms("attention_norm")
        self.attention = self._attention(SelfAttention, "attention")
        self.context_norm: Any = self._rms("context_norm") if is_decoder else None
        self.context_attention: Any = None
        if is_decoder:
            self.context_attention = self._attention(Attention, "context_attention")
        self.norm_layer = self._rms("norm")
        self.intermediate = self.dense(intermediate_size, "intermediate", use_bias=False)
        self.gate = self.dense(intermediate_size, "gate", use_bias=False) if gated else None
        self.output_dense = self.dense(hidden_size, "output", use_bias=False)
        self.dropped = self.inner(keras.layers.Dropout, dropout, name="dropout")

    def build(self, inputs_shape: Any, context_shape: Any = None) -> None:
        hidden = (*inputs_shape[:-1], self.hidden_size)
        built(self.attention_norm, *hidden)
        built(self.attention, *hidden)
        if self.is_decoder:
            built(self.context_norm, *hidden)
            _keras.layer_building.build(self.context_attention, hidden, hidden)
        built(self.norm_layer, *hidden)
        built(self.intermediate, *hidden)
        if self.gate is not None:
            built(self.gate, *hidden)
        built(self.output_dense, *inputs_shape[:-1], self.intermediate_size)
        self.built = True

    def call(
        self,
        inputs: tf.Tensor,
        context: Any = None,
        mask: Any = None,
        context_mask: Any = None,
        position_bias: Any = None,
        training: Any = None,
    ) -> tf.Tensor:
        def added(states: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
            return states + self.dropped(part, training=training)

        options = {"training": training}
        attended = self.attention(
            self.attention_norm(inputs), mask=mask, position_bias=position_bias, **options
        )
        states = added(inputs, attended)
        if self.is_decoder:
            normal = self.context_norm(states)
            attended = self.context_attention(normal, context, context_mask=context_mask, **options)
            states = added(states, attended)
        normal = self.norm_layer(states)
        between = self._function(self.intermediate(normal))
        if self.gate is not None:
            between *= self.gate(normal)
        return added(states, self.output_dense(self.dropped(between, training=training)))

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Returns the mask of the inputs' positions, or None."""
        return position_mask(mask[0] if isinstance(mask, (list, tuple)) else mask)

    def compute_output_shape(self, inputs_shape: Any, context_shape: Any = None) -> Any:
        return inputs_shape

    def _rms(self, name: str) -> RMSNormalization:
        return self.inner(RMSNormalization, epsilon=self.epsilon, name=name)

    def _attention(self, kind: type[MultiHeadAttention], name: str) -> MultiHeadAttention:
        return self.inner(
            kind,
            self.num_heads,
            self.head_size,
            self.hidden_size,
            dropout=self.dropout,
            use_bias=False,
            scale=False,
            initializer=self.initializer,
            name=name,
        )
