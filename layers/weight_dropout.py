"""`WeightDropout`: dropout on a layer's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfwd.layers._substitution import weight_selection
from tfwd.layers.parametrized import Parametrized
from tfwd.parametrizations import Dropout


@keras.saving.register_keras_serializable("tfwd")
class WeightDropout(Parametrized):
    """Drops entries of a layer's weights while it trains (DropConnect).

    Formula: a training call computes with `w' = m w / keep`, `m_i ~ Bernoulli(keep)`, `keep` being
    `1 - rate` rounded to a multiple of 2^-16; one mask for the batch and all time steps.

    Args:
        layer: any Keras layer or model.
        rate: the drop rate in [0, 1), a float, a schedule or a variable, as in
            `parametrizations.Dropout`.
        weights: a pattern or a list of patterns, as in `Parametrized`, or None for the default: the
            recurrent kernels of a recurrent layer (of both directions of a `Bidirectional`); of
            another layer every floating weight of rank two or more save biases, gammas and betas;
            of a layer of layers, all their defaults.
        noise_shape: as in `parametrizations.Dropout`: 1 shares the mask along an axis.
        seed, recompute, share_across_replicas, **kwargs: as in `Parametrized`.

    Raises:
        ValueError: as `Parametrized`.

    Example:

    >>> import keras, tensorflow as tf
    >>> from tfwd import layers
    >>> dense = layers.WeightDropout(keras.layers.Dense(3), rate=0.5, seed=1)
    >>> x = tf.ones((1, 4))
    >>> bool(tf.reduce_all(dense(x) == dense.layer(x)))
    True
    >>> bool(tf.reduce_all(dense(x, training=True) == dense.layer(x)))
    False

    References: Wan et al., "Regularization of Neural Networks using DropConnect" (2013).
    """

    def __init__(
        self,
        layer: keras.Layer,
        rate: Any,
        weights: str | Sequence[str] | None = None,
        noise_shape: Sequence[int | None] | None = None,
        seed: int | None = None,
        recompute: bool = True,
        share_across_replicas: bool = False,
        **kwargs: Any,
    ) -> None:
        parametrization = Dropout(rate, noise_shape)
        chosen = weight_selection.of_weights(layer, parametrization, weights)
        super().__init__(layer, chosen, seed, recompute, share_across_replicas, **kwargs)
        self.parametrization = parametrization

    @property
    def rate(self) -> Any:
        """The drop rate, as it was given."""
        return self.parametrization.rate

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["parametrizations"]
        return {**config, **self.parametrization.get_config(), "weights": self.weight_patterns}
