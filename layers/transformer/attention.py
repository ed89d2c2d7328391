"""`Attention` over another sequence, and `SelfAttention` over the same."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers.transformer.composite import Composite, built, initializer
from tfwd.layers.transformer.inputs import Inputs, of_places


class Heads(Composite):
    """What attention to another sequence and to the same one have in common; see `Attention`."""

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
                    f"{type(self).__name__} '{self.name}': {name}={size!r} is no positive integer"
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

    def build_products(self, inputs_shape: Any, context_shape: Any) -> None:
        """Builds the four products; those of a context of unknown shape are left to the call."""
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
        """The formula of `Attention`."""
        if context_mask is None:
            context_mask = _keras.layers.get_mask(context)
        if context_mask is not None:
            checked = Inputs(self)
            name = "mask" if context is inputs else "context_mask"
            context_mask = checked.mask(name, context_mask, keys=context, queries=inputs)
            inputs = checked.marked(inputs)
        queries = self._heads(self.query(inputs))
        keys = self._heads(self.key(context))
        values = self._heads(self.value(context))
        if self.scale:
            queries *= tf.constant(1 / math.sqrt(self.head_size), queries.dtype)
        scores = tf.matmul(queries, keys, transpose_b=True)
        if scores.dtype in (tf.float16, tf.bfloat16):
            scores = tf.cast(scores, tf.float32)  # sums of exponentials need more digits
        if position_bias is not None:
            scores += tf.cast(position_bias, scores.dtype)
        if context_mask is not None:
            scores += _left_out(context_mask, scores.dtype)
        weights = tf.cast(tf.nn.softmax(scores), values.dtype)
        if self.dropout:
            weights = self.dropped(weights, training=training)
        merged = tf.transpose(tf.matmul(weights, values), [0, 2, 1, 3])
        shape = tf.shape(inputs)
        merged = tf.reshape(merged, [shape[0], shape[1], self.num_heads * self.head_size])
        return self.output_dense(merged)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """The mask of the inputs' places, if there is one."""
        return of_places(mask[0] if isinstance(mask, (list, tuple)) else mask)

    def _heads(self, flat: tf.Tensor) -> tf.Tensor:
        """`[batch, places, heads * size]` as `[batch, heads, places, size]`."""
        shape = tf.shape(flat)
        split = tf.reshape(flat, [shape[0], shape[1], self.num_heads, self.head_size])
        return tf.transpose(split, [0, 2, 1, 3])


@keras.saving.register_keras_serializable("tfwd.transformer")
class Attention(Heads):
    """Multi-head attention from one sequence to another.

    Formula: for each head, with `q = x W_q + b_q`, and keys and values likewise from the context,

        y = concat over heads (softmax(s q k^T + bias, over the context) v) W_o + b_o

    where `s` is `1 / sqrt(head_size)`, or 1 without `scale`. Places of the context that the mask
    leaves out get a weight of 0; where it leaves out all, each gets the same.

    Args:
        num_heads: the number of heads.
        head_size: the width of a head's queries, keys and values.
        hidden_size: the width of the output.
        dropout: the rate at which attention weights are dropped while training.
        use_bias: whether the four products have biases.
        scale: whether scores are divided by the root of `head_size`.
        initializer: of the kernels; a float is the deviation of a truncated normal distribution.
        **kwargs: as for any layer.

    Call: `layer(x, context, context_mask=None, position_bias=None, training=None)`; `x` is `[batch,
    queries, features]`, `context` `[batch, places, features]`; `context_mask`, boolean or of zeros
    and ones, `[batch, places]` or `[batch, queries, places]`; by default the one that Keras keeps
    with the context. `position_bias`, `[1 or batch, num_heads, queries, places]`, is added to
    scores. Output: `[batch, queries, hidden_size]`.

    The layers that it holds are `query`, `key`, `value` and `output`, each a `Dense`.

    Raises:
        ValueError: a size is not positive.

    Example:

    >>> import tensorflow as tf
    >>> from tfwd.layers import transformer as T
    >>> attention = T.Attention(num_heads=2, head_size=4, hidden_size=8)
    >>> attention(tf.ones([3, 5, 8]), tf.ones([3, 7, 6])).shape
    TensorShape([3, 5, 8])

    References: Vaswani et al., "Attention Is All You Need" (2017).
    """

    def build(self, inputs_shape: Any, context_shape: Any = None) -> None:
        self.build_products(inputs_shape, context_shape)

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
class SelfAttention(Heads):
    """Multi-head attention of a sequence to itself: an `Attention` whose context is its input.

    Args:
        as `Attention`.

    Call: `layer(x, mask=None, position_bias=None, training=None)`. The mask, `[batch, places]` or
    `[batch, places, places]`, is by default the one that Keras keeps with `x`.

    Example:

    >>> import tensorflow as tf
    >>> from tfwd.layers import transformer as T
    >>> attention = T.SelfAttention(num_heads=2, head_size=4, hidden_size=8)
    >>> attention(tf.ones([3, 5, 8]), mask=tf.constant([[1, 1, 1, 0, 0]] * 3)).shape
    TensorShape([3, 5, 8])
    """

    def build(self, inputs_shape: Any) -> None:
        self.build_products(inputs_shape, inputs_shape)

    def call(
        self, inputs: tf.Tensor, mask: Any = None, position_bias: Any = None, training: Any = None
    ) -> tf.Tensor:
        return self.attend(inputs, inputs, mask, position_bias, training)

    def compute_output_shape(self, inputs_shape: Any) -> tuple:
        return (*inputs_shape[:-1], self.hidden_size)


_initializer = initializer


def _left_out(mask: Any, dtype: tf.DType) -> tf.Tensor:
    """What is added to scores: 0, or where the mask is false what leaves nothing of them."""
    mask = mask[:, None, None, :] if len(mask.shape) == 2 else mask[:, None, :, :]
    return tf.where(mask, tf.zeros([], dtype), tf.constant(dtype.min, dtype))
