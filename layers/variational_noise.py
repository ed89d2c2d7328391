"""`VariationalNoise`: Gaussian noise on a layer's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfwd.layers._substitution import weight_selection
from tfwd.layers.parametrized import Parametrized
from tfwd.parametrizations import GaussianNoise


@keras.saving.register_keras_serializable("tfwd")
class VariationalNoise(Parametrized):
    """Adds Gaussian noise to a layer's weights while it trains.

    Formula: a training call computes with `w' = w + stddev * e`, `e ~ N(0, I)`; one draw for the
    batch and all time steps. Before training call `start_step`, `w' = w` exactly.

    Args:
        layer: any Keras layer or model.
        stddev: the standard deviation, at least 0, a float, a schedule or a variable, as in
            `parametrizations.GaussianNoise`.
        weights: a pattern or a list of patterns, or None for the default, as in `WeightDropout`.
        start_step: the number of the layer's first training call that is noisy, from 0.
        scale: "absolute", or "deviation" for multiples of each weight's own standard deviation, as
            in `parametrizations.GaussianNoise`.
        seed, recompute, share_across_replicas, **kwargs: as in `Parametrized`.

    Raises:
        ValueError: as `Parametrized`.

    Example:

    >>> import keras, tensorflow as tf
    >>> from tfwd import layers
    >>> noisy = layers.VariationalNoise(keras.layers.Dense(3), stddev=0.1, start_step=1, seed=1)
    >>> x = tf.ones((1, 4))
    >>> [bool(tf.reduce_all(noisy(x, training=True) == noisy.layer(x))) for _ in range(2)]
    [True, False]

    References: Graves, "Practical Variational Inference for Neural Networks" (2011), with one
    fixed deviation for all weights, which is not learnt.
    """

    def __init__(
        self,
        layer: keras.Layer,
        stddev: Any,
        weights: str | Sequence[str] | None = None,
        start_step: int = 0,
        seed: int | None = None,
        recompute: bool = True,
        share_across_replicas: bool = False,
        scale: str = "absolute",
        **kwargs: Any,
    ) -> None:
        parametrization = GaussianNoise(stddev, start_step, scale)
        chosen = weight_selection.of_weights(layer, parametrization, weights)
        super().__init__(layer, chosen, seed, recompute, share_across_replicas, **kwargs)
        self.parametrization = parametrization

    @property
    def stddev(self) -> Any:
        """The standard deviation, as it was given."""
        return self.parametrization.stddev

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["parametrizations"]
        return {**config, **self.parametrization.get_config(), "weights": self.weight_patterns}
