"""`WeightDropout`: a wrapper that applies dropout to a layer's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfwd.layers._substitution.single_parametrization import SingleParametrization
from tfwd.parametrizations import Dropout


@keras.saving.register_keras_serializable("tfwd")
class WeightDropout(SingleParametrization):
    """A wrapper that drops entries of a layer's weights during training (DropConnect).

    Formula: a training call computes with `w' = m w / keep`, with `m_i ~ Bernoulli(keep)`. `keep`
    is `1 - rate` rounded to a multiple of 2^-16. The whole batch and all time steps share one mask,
    unless `per_example` is True.

    Args:
        layer: Any Keras layer or model.
        rate: float, schedule or variable. Drop rate in [0, 1), as in `parametrizations.Dropout`.
        weights: str or list of str. Patterns of weights, as in `Parametrized`. "all" stands for
            every trained weight, including biases. Default None, for the default weights. In a
            recurrent layer these are the recurrent kernels (of both directions of a
            `Bidirectional`). In another layer they are all floating weights of rank two or more,
            except biases, gammas and betas. A layer that contains layers has the default weights of
            all of them.
        noise_shape: As in `parametrizations.Dropout`. A 1 shares the mask along an axis. Default
            None.
        per_example: bool. Draws a mask for each example, for the kernel of a `Dense` or
            `EinsumDense` layer, as in `parametrizations.Dropout`. Default False.
        seed, recompute, share_across_replicas, exclude, **kwargs: As in `Parametrized`.

    Raises:
        ValueError: As `Parametrized`.

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
        exclude: str | Sequence[str] | None = None,
        *,
        per_example: bool = False,
        **kwargs: Any,
    ) -> None:
        parametrization = Dropout(rate, noise_shape=noise_shape, per_example=per_example)
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

    @property
    def rate(self) -> Any:
        """The given drop rate."""
        return self.parametrization.rate
