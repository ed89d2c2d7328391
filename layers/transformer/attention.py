"""`Attention` to another sequence, and `SelfAttention` to the same sequence."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers.transformer.composite_layer import Composite, built, initializer
from tfwd.layers.transformer.input_checks import InputChecks
from tfwd.layers.transformer.masked_attention_scores import masked_scores
from tfwd.layers.transformer.position_mask import position_mask


class MultiHeadAttention(Composite):
    """Base class of `Attention` and `SelfAttention`. See `Attention` for its arguments."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        hidden_size: int,
        dropout: float = 0.0,
        use_bias: bool = True,
        scale: bool = True,
        initializer: Any = 0.02,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        sizes = {"num_heads": num_heads, "head_size": head_size, "hidden_size": hidden_size}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"{type(self).__name__} '{self.name}': {name}={size!r}: expected a "
                    "positive integer"
                )
        self.num_heads = num_heads
        self.head_size = head_size
        self.hidden_size = hidden_size
        self.dropout = dropout
        self.use_bias = use_bias
        self.scale = scale
        self.initializer = _initializer(initializer)
        width = num_heads * head_size
        self.query = self.dense(width, "query", use_bias)
        self.key = self.dense(width, "key", use_bias)
        self.value = self.dense(width, "value", use_bias)
        self.output_dense = self.dense(hidden_size, "output", use_bias)
        self.dropped = self.inner(keras.layers.Dropout, dropout, name="dropout")

    def build_dense_layers(self, inputs_shape: Any, context_shape: Any) -> None:
        """Builds the four dense layers.

        If the shape of the context is unknown, the call builds the dense layers of the context.
        """
        built(self.query, *inputs_shape)
        if context_shape is not None:
            built(self.key, *context_shape)
            built(self.value, *context_shape)
        built(self.output_dense, *inputs_shape[:-1], self.num_heads * self.head_size)
        self.built = True

    def attend(
        self,
        inputs: tf.Tensor,
        context: tf.Tensor,
        context_mask: Any,
        position_bias: Any,
        training: Any,
    ) -> tf.Tensor:
        """Computes the formula of `Attention`."""
        if context_mask is None:
            context_mask = _keras.layers.get_mask(context)
        if context_mask is not None:
            checked = InputChecks(self)
            name = "mask" if context is inputs else "context_mask"
            context_mask = checked.mask(name, context_mask, keys=context, queries=inputs)
            inputs = checked.nan_if_wrong(inputs)
        queries = self._heads(self.query(inputs))
        keys = self._heads(self.key(context))
        values = self._heads(self.value(context))
        if self.scale:
            queries *= tf.constant(1 / math.sqrt(self.head_size), queries.dtype)
        scores = masked_scores(queries, keys, context_mask)
        if position_bias is not None:
            scores += tf.cast(position_bias, scores.dtype)
        weights = tf.cast(tf.nn.softmax(scores), values.dtype)
        if self.dropout:
            weights = self.dropped(weights, training=training)
        merged = tf.transpose(tf.matmul(weights, values), [0, 2, 1, 3])
        shape = tf.shape(inputs)
        merged = tf.reshape(merged, [shape[0], shape[1], self.num_heads * self.head_size])
        return self.output_dense(merged)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Returns the mask of the inputs' positions, or None."""
        return position_mask(mask[0] if isinstance(mask, (list, tuple)) else mask)

    def _heads(self, flat: tf.Tensor) -> tf.Tensor:
        """Converts `[batch, length, heads * size]` to `[batch, heads, length, size]`."""
        shape = tf.shape(flat)
        split = tf.reshape(flat, [shape[0], shape[1], self.num_heads, self.head_size])
        return tf.transpose(split, [0, 2, 1, 3])


@keras.saving.register_keras_serializable("tfwd.transformer")
class Attention(MultiHeadAttention):
    """Multi-head attention from one sequence to another.

    Formula: for each head, `q = x W_q + b_q`. The keys k and the values v are computed from the
    context in the same way.

        y = concat over heads (softmax(s q k^T + bias, over the context) v) W_o + b_o

    `s` is `1 / sqrt(head_size)`, or 1 without `scale`. Masked positions of the context get a weight
    of 0. If all positions are masked, each gets the same weight.

    Args:
        num_heads: int. Number of heads.
        head_size: int. Width of a head's queries, keys and values.
        hidden_size: int. Width of the output.
        dropout: float. Dropout rate of attention weights. Default 0.
        use_bias: bool. Adds biases to the four dense layers. Default True.
        scale: bool. Divides scores by the square root of `head_size`. Default True.
        initializer: Initializer of the kernels. A float is the standard deviation of a truncated
            normal distribution. Default 0.02.
        **kwargs: Arguments of every Keras layer, such as `name`.

    Call: `layer(x, context, context_mask=None, position_bias=None, training=None)`.

    - `x`: `[batch, queries, features]`.
    - `context`: `[batch, length, features]`.
    - `context_mask`: `[batch, length]` or `[batch, queries, length]`, boolean, or of zeros and
      ones. The default is the mask that Keras stores with the context.
    - `position_bias`: `[1 or batch, num_heads, queries, length]`. It is added to the scores.
    - Output: `[batch, queries, hidden_size]`.

    Sublayers: `query`, `key`, `value` and `output`, each a `Dense`.

    Raises:
        ValueError: If a size is not positive.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.layers import transformer as T
        >>> attention = T.Attention(num_heads=2, head_size=4, hidden_size=8)
        >>> attention(tf.ones([3, 5, 8]), tf.ones([3, 7, 6])).shape
        TensorShape([3, 5, 8])

    References: Vaswani et al., "Attention Is All You Need" (2017).
    """

    def build(self, inputs_shape: Any, context_shape: Any = None) -> None:
        self.build_dense_layers(inputs_shape, context_shape)

    def call(
        self,
        inputs: tf.Tensor,
        context: tf.Tensor,
        context_mask: Any = None,
        position_bias: Any = None,
        training: Any = None,
    ) -> tf.Tensor:
        return self.attend(inputs, context, context_mask, position_bias, training)

    def compute_output_shape(self, inputs_shape: Any, context_shape: Any = None) -> tuple:
        return (*inputs_shape[:-1], self.hidden_size)


@keras.saving.register_keras_serializable("tfwd.transformer")
class SelfAttention(MultiHeadAttention):
    """Multi-head attention of a sequence to itself: an `Attention` whose context is its input.

    Args:
        num_heads, head_size, hidden_size, dropout, use_bias, scale, initializer, **kwargs: As in
            `Attention`.

    Call: `layer(x, mask=None, position_bias=None, training=None)`. The mask is `[batch, length]` or
    `[batch, length, length]`. By default it is the mask that Keras stores with `x`.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.layers import transformer as T
        >>> attention = T.SelfAttention(num_heads=2, head_size=4, hidden_size=8)
        >>> attention(tf.ones([3, 5, 8]), mask=tf.constant([[1, 1, 1, 0, 0]] * 3)).shape
        TensorShape([3, 5, 8])
    """

    def build(self, inputs_shape: Any) -> None:
        self.build_dense_layers(inputs_shape, inputs_shape)

    def call(
        self, inputs: tf.Tensor, mask: Any = None, position_bias: Any = None, training: Any = None
    ) -> tf.Tensor:
        return self.attend(inputs, inputs, mask, position_bias, training)

    def compute_output_shape(self, inputs_shape: Any) -> tuple:
        return (*inputs_shape[:-1], self.hidden_size)


_initializer = initializer
