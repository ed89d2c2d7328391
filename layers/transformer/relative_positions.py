"""`RelativePositions`: what is added to attention scores for the distance of two places."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd.layers.transformer import composite
from tfwd.layers.transformer.composite import Composite, built


@keras.saving.register_keras_serializable("tfwd.transformer")
class RelativePositions(Composite):
    """A number for each head and each bucket of distances, as T5 has them.

    Formula: `bias[h, i, j] = table[bucket(j - i), h]`. Small distances have a bucket each, larger
    ones share buckets whose widths grow like the distance, up to `max_distance`.

    Args:
        num_heads: the number of heads.
        num_buckets: the number of buckets, of both directions together.
        max_distance: from here on all distances have the last bucket.
        bidirectional: whether places behind have buckets too; without it theirs is that of 0.
        initializer: of the table; a float is the deviation of a truncated normal distribution.
        **kwargs: as for any layer.

    Raises:
        ValueError: there are no buckets for larger distances: `num_buckets` is less than 4 (or 2,
            if not bidirectional), or `max_distance` is not beyond the distances that have a bucket
            each.

    Call: `layer(x, context)`, of which only the lengths count. Output: `[1, num_heads, places of x,
    places of context]`. The layer that it holds is `buckets`, an `Embedding`.

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
                f"{max_distance}: give at least {least} buckets ({kind}), and a max_distance of "
                f"more than {max(count // 2, 1)}, up to which each distance has its own bucket"
            )
        self.num_heads = num_heads
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.initializer = composite.initializer(initializer)
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
        places = tf.range(tf.shape(context)[1])[None] - tf.range(tf.shape(inputs)[1])[:, None]
        far = tf.constant(self._by_distance())
        most = len(self._by_distance()) - 1
        if self.bidirectional:
            found = tf.gather(far, tf.minimum(tf.abs(places), most))
            found += tf.where(places > 0, self.num_buckets // 2, 0)
        else:
            found = tf.gather(far, tf.clip_by_value(-places, 0, most))
        return tf.transpose(self.buckets(found), [2, 0, 1])[None]

    def compute_output_shape(self, inputs_shape: Any, context_shape: Any = None) -> tuple:
        context_shape = context_shape or inputs_shape
        return (1, self.num_heads, inputs_shape[1], context_shape[1])

    def _by_distance(self) -> np.ndarray:
        """The bucket of each distance from 0 to `max_distance`, in one direction."""
        count = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        exact = count // 2
        distances = np.arange(max(self.max_distance, exact) + 1)
        ratio = np.log(np.maximum(distances, 1).astype(np.float32) / np.float32(exact))
        steps = ratio / np.float32(math.log(self.max_distance / exact)) * (count - exact)
        shared = np.minimum(exact + steps.astype(np.int32), count - 1)
        return np.where(distances < exact, distances, shared).astype(np.int32)
