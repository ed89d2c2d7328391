"""`DropoutEmbedding`: an embedding with dropout on whole rows, that is, on whole words."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers._substitution.weight_perturbation_mixin import (
    PERTURBATION_ATTRIBUTES,
    WeightPerturbationMixin,
)
from tfwd.parametrizations import Dropout


@keras.saving.register_keras_serializable("tfwd")
class DropoutEmbedding(WeightPerturbationMixin, keras.layers.Embedding):
    """An embedding layer with dropout on its rows: a dropped word is zero in the whole batch.

    Formula: `y = m[i] E[i] / keep` for the id `i`, with `m[i] ~ Bernoulli(keep)`. Each training
    call draws once per word of the vocabulary. `keep` is `1 - rate` rounded to a multiple of 2^-16.

    It equals `Parametrized(Embedding(...), {"embeddings": Dropout(rate, noise_shape=(None, 1))})`,
    with the same draws. The matrix is not copied: only the rows of the batch are read. The gradient
    stays sparse (`tf.IndexedSlices`).

    It is a `keras.layers.Embedding` with the same arguments and weights. A layer that shares the
    matrix, such as `TiedDense`, reads the raw matrix.

    Args:
        input_dim: int. Number of words.
        output_dim: int. Size of a word's vector.
        rate: float, schedule or variable. Drop rate in [0, 1), as in `parametrizations.Dropout`.
        seed: int. Default None, which draws a seed from Keras's global seed.
        recompute: As in `Parametrized`.
        **kwargs: All other arguments of `keras.layers.Embedding`.

    Raises:
        ValueError: If the rate is out of range.

    Example:
        >>> import keras, tensorflow as tf
        >>> from tfwd import layers
        >>> embedding = layers.DropoutEmbedding(10, 4, rate=0.5, seed=1)
        >>> y = embedding(tf.constant([[3, 7, 3]]), training=True)
        >>> bool(tf.reduce_all(y[0, 0] == y[0, 2]))
        True

    References: Gal and Ghahramani (2016); Merity et al. (2017).
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        rate: Any,
        seed: int | None = None,
        recompute: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_dim, output_dim, **kwargs)
        self._init_perturbation(
            {"embeddings": Dropout(rate, noise_shape=(None, 1))}, seed, recompute
        )

    @property
    def rate(self) -> Any:
        """The given drop rate."""
        return self.parametrizations["embeddings"].rate

    def call(self, inputs: tf.Tensor, training: Any = None) -> tf.Tensor:
        def embed(inputs: tf.Tensor, training: bool) -> tf.Tensor:
            return keras.layers.Embedding.call(self, inputs)

        return self._perturbed_call(embed, (inputs,), {}, training)

    def _unperturbed_call(self, inputs: tf.Tensor, training: Any = None) -> tf.Tensor:
        return keras.layers.Embedding.call(self, inputs)

    def compute_output_spec(self, inputs: Any, training: Any = None) -> Any:
        return super().compute_output_spec(inputs)

    def unwrapped(self) -> keras.layers.Embedding:
        """Returns a plain `keras.layers.Embedding` on the same variables."""
        return _keras.copies.share(self, keras.layers.Embedding, leave_out=PERTURBATION_ATTRIBUTES)

    def get_config(self) -> dict[str, Any]:
        rate = self.parametrizations["embeddings"].get_config()["rate"]
        config = {**super().get_config(), "rate": rate}
        return {**config, "seed": self.seed, "recompute": self.recompute}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DropoutEmbedding:
        return cls(**{**config, "rate": _keras.copies.deserialize(config["rate"])})
