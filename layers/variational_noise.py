"""`VariationalNoise`: a wrapper that adds Gaussian noise to a layer's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfwd.layers._substitution.single_parametrization import SingleParametrization
from tfwd.parametrizations import GaussianNoise
from tfwd.parametrizations.gaussian_noise import with_start_call


@keras.saving.register_keras_serializable("tfwd")
class VariationalNoise(SingleParametrization):
    """A wrapper that adds Gaussian noise to a layer's weights during training.

    Formula: a training call computes with `w' = w + stddev * e`, with `e ~ N(0, I)`. The whole
    batch and all time steps share one draw. Before training call `start_call`, `w' = w` exactly.

    Args:
        layer: Any Keras layer or model.
        stddev: float, schedule or variable. Standard deviation, at least 0, as in
            `parametrizations.GaussianNoise`.
        weights: str or list of str. Patterns of weights. "all" stands for every trained weight,
            including biases and gammas, as in the paper. Default None, for the default weights, as
            in `WeightDropout`.
        start_call: int. Number of the layer's first training call with noise, from 0. Default 0.
        scale: "absolute", or "deviation" for multiples of each weight's own standard deviation, as
            in `parametrizations.GaussianNoise`. Default "absolute".
        seed, recompute, share_across_replicas, exclude, **kwargs: As in `Parametrized`.

    Raises:
        ValueError: As `Parametrized`.

    Example:
        >>> import keras, tensorflow as tf
        >>> from tfwd import layers
        >>> noisy = layers.VariationalNoise(keras.layers.Dense(3), stddev=0.1, start_call=1, seed=1)
        >>> x = tf.ones((1, 4))
        >>> [bool(tf.reduce_all(noisy(x, training=True) == noisy.layer(x))) for _ in range(2)]
        [True, False]
        >>> noisy = layers.VariationalNoise(keras.layers.LSTM(3), 0.075, weights="all")
        >>> noisy.build((None, 5, 2))
        >>> list(noisy.effective_weights(0))
        ['kernel', 'recurrent_kernel', 'bias']

    References: Graves, "Practical Variational Inference for Neural Networks" (2011), with one fixed
    standard deviation for all weights, which is not trained.
    """

    def __init__(
        self,
        layer: keras.Layer,
        stddev: Any,
        weights: str | Sequence[str] | None = None,
        start_call: int = 0,
        scale: str = "absolute",
        seed: int | None = None,
        recompute: bool = True,
        share_across_replicas: bool = False,
        exclude: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        parametrization = GaussianNoise(stddev, start_call=start_call, scale=scale)
        super().__init__(
            layer,
            parametrization,
            weights,
            seed,
            recompute,
            share_across_replicas,
            exclude,
            **kwargs,
        )

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> VariationalNoise:
        """Creates the layer from a config. `start_step` is the former name of `start_call`."""
        return super().from_config(with_start_call(config), custom_objects)

    @property
    def stddev(self) -> Any:
        """The given standard deviation."""
        return self.parametrization.stddev
