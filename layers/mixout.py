"""`Mixout`: a wrapper that mixes a layer's weights with their pretrained values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfwd import parametrizations
from tfwd.layers._substitution.single_parametrization import SingleParametrization


@keras.saving.register_keras_serializable("tfwd")
class Mixout(SingleParametrization):
    """A wrapper that mixes a layer's weights with the pretrained weights during training.

    Formula: a training call computes with `w' = r + m (w - r) / keep`. `r` is the reference, and
    `m_i ~ Bernoulli(keep)`. `keep` is `1 - rate` rounded to a multiple of 2^-16. The whole batch
    and all time steps share one mask. So `E[w'] = w`.

    Args:
        layer: Any Keras layer or model.
        rate: float, schedule or variable. Drop rate in [0, 1), as in `parametrizations.Dropout`.
        weights: str or list of str. Patterns of weights. "all" stands for every trained weight.
            Default None, for the default weights, as in `WeightDropout`.
        towards, noise_shape, reference_dtype: As in `parametrizations.Mixout`. By default the
            reference is the value of the weights in the first training call. It stays if the
            weights are set or loaded later; see `parametrizations.Mixout` for the warnings.
        seed, recompute, share_across_replicas, exclude, **kwargs: As in `Parametrized`.

    Raises:
        ValueError: As `Parametrized`, or if there is no reference for a weight.

    Example:
        >>> import keras, tensorflow as tf
        >>> from tfwd import layers
        >>> dense = layers.Mixout(keras.layers.Dense(3), rate=0.5, seed=1)
        >>> x = tf.ones((1, 4))
        >>> bool(tf.reduce_all(dense(x, training=True) == dense.layer(x)))  # no weight has changed
        True
        >>> dense.layer.kernel.assign_add(tf.ones((4, 3))) is None
        False
        >>> bool(tf.reduce_all(dense(x, training=True) == dense.layer(x)))
        False

    References: Lee, Cho and Kang, "Mixout: Effective Regularization to Finetune Large-scale
    Pretrained Language Models" (2020).
    """

    def __init__(
        self,
        layer: keras.Layer,
        rate: Any,
        weights: str | Sequence[str] | None = None,
        towards: Any = "start",
        noise_shape: Sequence[int | None] | None = None,
        reference_dtype: str | None = None,
        seed: int | None = None,
        recompute: bool = True,
        share_across_replicas: bool = False,
        exclude: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        parametrization = parametrizations.Mixout(
            rate, towards=towards, noise_shape=noise_shape, reference_dtype=reference_dtype
        )
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
