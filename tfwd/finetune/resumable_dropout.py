"""`Dropout`: dropout on activations whose draws resume after a restart.

Keras's own dropout draws from a state that TensorFlow's checkpoints do not save on Keras 3, and
that nothing can save on Keras 2.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd._random import global_batch_rows
from tfwd.layers._substitution import caller_detection
from tfwd.layers._substitution.seed_stream import SeedStream


class Dropout(keras.layers.Layer):
    """Dropout whose mask depends only on its seed and the training-call counter.

    Formula: `y = m x / (1 - rate)` with `m ~ Bernoulli(1 - rate)` for each entry.

    Args:
        rate: float. The drop rate in [0, 1).
        seed: int. Seed of the masks.
        **kwargs: the arguments of any layer.

    Example:
    >>> layer = Dropout(0.5, seed=1)
    >>> sorted({*layer(tf.ones([64]), training=True).numpy().tolist()})
    [0.0, 2.0]
    """

    def __init__(self, rate: float, seed: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.rate, self.seed = rate, seed
        self.draws = SeedStream(seed)
        self.supports_masking = True
        self.built = True  # there is nothing to build

    def call(self, inputs: tf.Tensor, training: Any = None) -> tf.Tensor:
        if not training or not self.rate:
            return inputs
        caller_detection.check_not_recomputed(self.name)
        (seed,) = self.draws.seeds_from_state(self.draws.next(True), [0])
        shape, dtype = tf.shape(inputs), inputs.dtype
        part = global_batch_rows.current()
        if part is not None:
            shape = tf.concat([[tf.cast(part.total, tf.int32)], shape[1:]], 0)
        drawn = tf.random.stateless_uniform(shape, seed, dtype=tf.float32)
        if part is not None:
            drawn = tf.gather(drawn, part.of(inputs))
        kept = tf.cast(drawn >= self.rate, dtype) * tf.constant(1 / (1 - self.rate), dtype)
        outputs = inputs * kept
        outputs.set_shape(inputs.shape)
        return outputs

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "rate": self.rate, "seed": self.seed}
