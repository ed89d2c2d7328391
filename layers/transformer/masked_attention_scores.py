"""Scores of attention with the mask of the keys inside the product of queries and keys.

Scores are the largest tensors of a transformer: `[batch, heads, queries, keys]`. Adding a mask
takes a pass over all scores. Here each query gets an additional column of 1, and each key gets an
additional column with its bias. The product then adds the bias itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfwd._graph import private_graph_apis
from tfwd._graph.custom_gradient import custom_gradient

# Scores below 2**102 vanish beside this bias. So masked keys have equal scores, even in a row in
# which all keys are masked. A power of two stays finite and exact if a GPU rounds factors (TF32).
_MASKED = {tf.float32: -(2.0**127), tf.float64: -(2.0**1023)}


def masked_scores(queries: tf.Tensor, keys: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Computes the products of queries and keys. Masked keys get a huge negative score.

    Args:
        queries: `[batch, heads, queries, size]`.
        keys: `[batch, heads, keys, size]`.
        mask: Booleans `[batch, keys]` or `[batch, queries, keys]`, or None.

    Returns:
        `[batch, heads, queries, keys]`, in float32 if the queries have half precision.
    """
    of_keys = mask is not None and mask.shape.rank == 2
    # XLA adds the mask inside the loop of the softmax, without an additional pass.
    if of_keys and queries.dtype in _MASKED and not private_graph_apis.in_xla():
        return _product(queries, keys, mask)
    scores = tf.matmul(queries, keys, transpose_b=True)
    if scores.dtype in (tf.float16, tf.bfloat16):
        scores = tf.cast(scores, tf.float32)  # sums of exponentials need more digits
    if mask is not None:
        mask = mask[:, None, None, :] if of_keys else mask[:, None, :, :]
        dtype = scores.dtype
        scores += tf.where(mask, tf.zeros([], dtype), tf.constant(dtype.min, dtype))
    return scores


def _product(queries: tf.Tensor, keys: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Computes scores with the mask in the product. Backward does not see the columns."""
    dtype = queries.dtype
    bias = tf.where(mask, tf.zeros([], dtype), tf.constant(_MASKED[dtype], dtype))

    @custom_gradient
    def product(queries: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        column = tf.broadcast_to(bias[:, None, :, None], tf.shape(keys[..., :1]))
        ones = tf.ones_like(queries[..., :1])
        left, right = tf.concat([queries, ones], -1), tf.concat([keys, column], -1)

        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            by_queries = tf.matmul(upstream, keys)
            return by_queries, tf.matmul(upstream, queries, transpose_a=True)

        return tf.matmul(left, right, transpose_b=True), gradient

    return product(queries, keys)
