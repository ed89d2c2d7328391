"""`LockedDropout`: dropout on activations, with one mask for all time steps."""

from __future__ import annotations

import numbers
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras, training_flag
from tfwd._random import dropout_and_noise, global_batch_rows
from tfwd.layers._substitution import caller_detection
from tfwd.layers._substitution.seed_stream import SeedStream
from tfwd.parametrizations import Dropout


@keras.saving.register_keras_serializable("tfwd")
class LockedDropout(keras.layers.Layer):
    """Variational dropout, which drops the same features of a sequence at all time steps.

    Formula: `y[b, t, ...] = m[b, ...] x[b, t, ...] / keep` with `m ~ Bernoulli(keep)`. Each example
    of the batch has its own mask. `keep` is `1 - rate` rounded to a multiple of 2^-16.

    It differs from `keras.layers.SpatialDropout1D` in its seeds. A mask depends only on the seed,
    the training-call counter and the replica. The draws continue after a restart. Backward stores
    only the seed.

    Args:
        rate: float, schedule or variable. Drop rate in [0, 1), as in `parametrizations.Dropout`.
        seed: int. Default None, which draws a seed from Keras's global seed.
        **kwargs: Arguments of every Keras layer, such as `name`.

    Input and output: `[batch, time, ...]`, floating.

    Raises:
        ValueError: If the rate is out of range, or if the input has no time axis.

    Example:
        >>> import keras, tensorflow as tf
        >>> from tfwd import layers
        >>> y = layers.LockedDropout(0.5, seed=1)(tf.ones((2, 5, 8)), training=True)
        >>> bool(tf.reduce_all(y[:, :1] == y))
        True

    References: Gal and Ghahramani, "A Theoretically Grounded Application of Dropout in Recurrent
    Neural Networks" (2016).
    """

    def __init__(self, rate: Any, seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._dropout = Dropout(rate)
        self._dropout.check(f"LockedDropout '{self.name}'")
        self.seed = seed
        self.draws = SeedStream(seed)
        self.supports_masking = True
        self._rank: int | None = None

    @property
    def rate(self) -> Any:
        """The given drop rate."""
        return self._dropout.rate

    @property
    def calls(self) -> int | tf.Tensor:
        """Number of training calls so far. The next training call has this number."""
        return self.draws.calls

    def build(self, input_shape: Any) -> None:
        if len(input_shape) < 2:
            raise ValueError(
                f"LockedDropout '{self.name}' expects [batch, time, ...]; "
                f"got an input of shape {tuple(input_shape)}"
            )
        self._rank = len(input_shape)

    def call(self, inputs: tf.Tensor, training: Any = None) -> tf.Tensor:
        training = training_flag.standardize(training)
        if training is False:
            return inputs
        if self._dropout.is_identity:
            self.draws.next(training)  # nothing is drawn, but the call counts
            return inputs
        caller_detection.check_not_recomputed(self.name)
        state = self.draws.next(training)
        rate = self._dropout.at(state[1]).rate
        (seed,) = self.draws.seeds_from_state(state, [0])

        part = global_batch_rows.current()

        def drop() -> tf.Tensor:
            if part is not None:
                mask_shape = (None, 1, *inputs.shape[2:])
                return dropout_and_noise.dropout(inputs, rate, seed, mask_shape, part.of(inputs))
            shape = tf.shape(inputs)
            mask_shape = tf.concat([shape[:1], [1], shape[2:]], axis=0)
            return dropout_and_noise.dropout(inputs, rate, seed, mask_shape)

        outputs = training_flag.cond(training, drop, lambda: tf.identity(inputs))
        outputs.set_shape(inputs.shape)
        return outputs

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def unwrapped(self) -> keras.layers.Layer:
        """Returns a plain Keras layer with the same dropout.

        It is `SpatialDropout1D` for inputs of rank 3, and `Dropout` for other ranks. A rate that is
        a schedule or a variable becomes 0.
        """
        rate = float(self.rate) if isinstance(self.rate, numbers.Real) else 0.0
        options = {"name": self.name, "dtype": self.dtype_policy}
        if self._rank in (None, 3):
            return keras.layers.SpatialDropout1D(rate, **options)
        noise_shape = (None, 1, *[None] * (self._rank - 2))
        return keras.layers.Dropout(rate, noise_shape=noise_shape, **options)

    def get_config(self) -> dict[str, Any]:
        rate = self._dropout.get_config()["rate"]
        return {**super().get_config(), "rate": rate, "seed": self.seed}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LockedDropout:
        return cls(**{**config, "rate": _keras.copies.deserialize(config["rate"])})
