"""`Mixout`: dropout of a layer's weights towards what they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfwd import parametrizations
from tfwd.layers._substitution import weight_selection
from tfwd.layers.parametrized import Parametrized


@keras.saving.register_keras_serializable("tfwd")
class Mixout(Parametrized):
    """Mixes a layer's weights with the pretrained ones while it trains.

    Formula: a training call computes with `w' = r + m (w - r) / keep`, `r` being the reference,
    `m_i ~ Bernoulli(keep)` and `keep` being `1 - rate` rounded to a multiple of 2^-16; one mask for
    the batch and all time steps. So `E[w'] = w`.

    Args:
        layer: any Keras layer or model.
        rate: the drop rate in [0, 1), a float, a schedule or a variable, as in
            `parametrizations.Dropout`.
        weights: a pattern or a list of patterns, or None for the default, as in `WeightDropout`.
        towards, noise_shape, reference_dtype: as in `parametrizations.Mixout`. By default the
            reference is what the weights are in the first training call.
        seed, recompute, share_across_replicas, **kwargs: as in `Parametrized`.

    Raises:
        ValueError: as `Parametrized`; or there is no reference for a weight.

    Example:

    >>> import keras, tensorflow as tf
    >>> from tfwd import layers
    >>> dense = layers.Mixout(keras.layers.Dense(3), rate=0.5, seed=1)
    >>> x = tf.ones((1, 4))
    >>> bool(tf.reduce_all(dense(x, training=True) == dense.layer(x)))  # nothing has moved yet
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
        **kwargs: Any,
    ) -> None:
        parametrization = parametrizations.Mixout(rate, towards, noise_shape, reference_dtype)
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
