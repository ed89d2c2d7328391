"""`RelativePositions`: a bias for attention scores that depends on distances."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd.layers.transformer import composite_layer
from tfwd.layers.transformer.composite_layer import Composite, built


@keras.saving.register_keras_serializable("tfwd.transformer")
class RelativePositions(Composite):
    """Relative position bias of attention scores, one number per head and bucket, as in T5.

    Formula: `bias[h, i, j] = table[bucket(j - i), h]`. Each small distance has its own bucket.
    Larger distances share buckets, whose widths grow with the distance up to `max_distance`.

    Args:
        num_heads: int. Number of heads.
        num_buckets: int. Number of buckets for both directions together. Default 32.
        max_distance: int. From this distance on, all distances share the last bucket. Default 128.
        bidirectional: bool. Later positions have their own buckets. If False, all later positions
            share the bucket of distance 0. Default True.
        initializer: Initializer of the table. A float is the standard deviation of a truncated
            normal distribution. Default 0.05.
        **kwargs: Arguments of every Keras layer, such as `name`.

    Raises:
        ValueError: If there are no buckets for larger distances. This happens if `num_buckets` is
            less than 4 (2 if not bidirectional), or if each distance up to `max_distance` has its
            own bucket.

    Call: `layer(x, context)`. Only the lengths of `x` and `context` matter. Output:
    `[1, num_heads, length of x, length of context]`. Sublayer: `buckets`, an `Embedding`.

    References: Raffel et al., "Exploring the Limits of Transfer Learning" (2020).
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        initializer: Any = 0.05,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        count = num_buckets // 2 if bidirectional else num_buckets
        if count < 2 or max_distance <= count // 2:
            least, kind = (4, "bidirectional") if bidirectional else (2, "one-directional")
            raise ValueError(
                f"RelativePositions '{self.name}': num_buckets={num_buckets}, max_distance="
                f"{max_distance}: pass at least {least} buckets ({kind}), and a max_distance of "
                f"more than {max(count // 2, 1)}. Smaller distances have their own buckets"
            )
        self.num_heads = num_heads
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.initializer = composite_layer.initializer(initializer)
        self.buckets = self.inner(
            keras.layers.Embedding,
            num_buckets,
            num_heads,
            embeddings_initializer=self.initializer,
            name="buckets",
        )

    def build(self, inputs_shape: Any, context_shape: Any = None) -> None:
        built(self.buckets, None, None)
        self.built = True

    def call(self, inputs: tf.Tensor, context: tf.Tensor) -> tf.Tensor:
        positions = tf.range(tf.shape(context)[1])[None] - tf.range(tf.shape(inputs)[1])[:, None]
        far = tf.constant(self._by_distance())
        most = len(self._by_distance()) - 1
        if self.bidirectional:
            found = tf.gather(far, tf.minimum(tf.abs(positions), most))
            found += tf.where(positions > 0, self.num_buckets // 2, 0)
        else:
            found = tf.gather(far, tf.clip_by_value(-positions, 0, most))
        return tf.transpose(self.buckets(found), [2, 0, 1])[None]

    def compute_output_shape(self, inputs_shape: Any, context_shape: Any = None) -> tuple:
        context_shape = context_shape or inputs_shape
        return (1, self.num_heads, inputs_shape[1], context_shape[1])

    def _by_distance(self) -> np.ndarray:
        """Returns the bucket of each distance from 0 to `max_distance`, in one direction."""
        count = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        exact = count // 2
        distances = np.arange(max(self.max_distance, exact) + 1)
        ratio = np.log(np.maximum(distances, 1).astype(np.float32) / np.float32(exact))
        steps = ratio / np.float32(math.log(self.max_distance / exact)) * (count - exact)
        shared = np.minimum(exact + steps.astype(np.int32), count - 1)
        return np.where(distances < exact, distances, shared).astype(np.int32)
