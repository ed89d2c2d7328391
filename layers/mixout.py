"""`Mixout`: a layer whose weights are at random what they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfwd import parametrizations
from tfwd.layers import weight_selection
from tfwd.layers.parametrized import Parametrized


@keras.saving.register_keras_serializable("tfwd")
class Mixout(Parametrized):
    """Replaces entries of a layer's weights by the pretrained ones while it trains.

    Formula: a training call computes with `w' = w0 + m (w - w0) / keep`, `m_i ~ Bernoulli(keep)`,
    `keep` being `1 - rate` rounded to a multiple of 2^-16, and `w0` what the weight was in the
    first training call, or what `towards` has for it. It is `WeightDropout` where `w0 = 0`.

    Args:
        layer: any Keras layer or model.
        rate: the rate in [0, 1), as in `parametrizations.Mixout`.
        weights: as in `WeightDropout`.
        towards, noise_shape, reference_dtype: as in `parametrizations.Mixout`.
        seed, recompute, share_across_replicas, **kwargs: as in `Parametrized`.

    Raises:
        ValueError: as `Parametrized` and `parametrizations.Mixout`.

    Example:

    >>> import keras, tensorflow as tf
    >>> from tfwd import layers
    >>> dense = layers.Mixout(keras.layers.Dense(3), rate=0.5, seed=1)
    >>> x = tf.ones((1, 4))
    >>> bool(tf.reduce_all(dense(x, training=True) == dense(x)))  # it is what it was
    True
    >>> _ = dense.layer.kernel.assign(2.0 * dense.layer.kernel + 1.0)
    >>> bool(tf.reduce_all(dense(x, training=True) == dense(x)))
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
        **kwargs: Any,
    ) -> None:
        parametrization = parametrizations.Mixout(rate, towards, noise_shape, reference_dtype)
        chosen = weight_selection.of_weights(layer, parametrization, weights)
        super().__init__(layer, chosen, seed, recompute, share_across_replicas, **kwargs)
        self.parametrization = parametrization

    @property
    def rate(self) -> Any:
        """The rate, as it was given."""
        return self.parametrization.rate

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["parametrizations"]
        return {**config, **self.parametrization.get_config(), "weights": self.weight_patterns}
