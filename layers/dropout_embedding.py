"""`DropoutEmbedding`: an embedding that drops whole rows, that is, whole words."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers._substitution.weight_perturbation import (
    PERTURBATION_ATTRIBUTES,
    WeightPerturbationMixin,
)
from tfwd.parametrizations import Dropout


@keras.saving.register_keras_serializable("tfwd")
class DropoutEmbedding(WeightPerturbationMixin, keras.layers.Embedding):
    """An embedding whose rows are dropped while it trains: a dropped word is zero all batch long.

    Formula: `y = m[i] E[i] / keep` for the id `i`, `m[i] ~ Bernoulli(keep)` one draw for each word
    of the vocabulary and training call, `keep` being `1 - rate` rounded to a multiple of 2^-16.
    That is `Parametrized(Embedding(...), {"embeddings": Dropout(rate, (None, 1))})`, draw for draw,
    without a copy of the matrix: only the rows that the batch asks for are touched, and the
    gradient stays sparse (`tf.IndexedSlices`).

    It is a `keras.layers.Embedding`, with its arguments and weights. A layer that shares the
    matrix, such as `TiedDense`, sees the raw one.

    Args:
        input_dim: the number of words.
        output_dim: the size of a word's vector.
        rate: the drop rate in [0, 1): a float, a schedule or a variable, as in
            `parametrizations.Dropout`.
        seed: an integer, or None for one that is drawn from Keras's global seed.
        **kwargs: everything else that `keras.layers.Embedding` takes.

    Raises:
        ValueError: if the rate is out of range.

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
        self._init_perturbation({"embeddings": Dropout(rate, (None, 1))}, seed, recompute)

    @property
    def rate(self) -> Any:
        """The drop rate, as it was given."""
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
        """A plain `keras.layers.Embedding` on the same variables."""
        return _keras.copies.share(self, keras.layers.Embedding, leave_out=PERTURBATION_ATTRIBUTES)

    def get_config(self) -> dict[str, Any]:
        rate = self.parametrizations["embeddings"].get_config()["rate"]
        config = {**super().get_config(), "rate": rate}
        return {**config, "seed": self.seed, "recompute": self.recompute}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DropoutEmbedding:
        return cls(**{**config, "rate": _keras.configs.deserialize(config["rate"])})
