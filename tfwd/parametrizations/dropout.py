"""`Dropout`: weight dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import parametrization_rates
from tfwd._random import dropout_and_noise, example_masks, masks_and_normals
from tfwd.parametrizations.base import Parametrization, copy_with


@keras.saving.register_keras_serializable("tfwd")
class Dropout(Parametrization):
    """Weight dropout (DropConnect): each entry is kept with probability `keep`, else exactly zero.

    Formula: `w'_i = m_i w_i / keep` with `m_i ~ Bernoulli(keep)`. `keep` is `1 - rate` rounded to a
    multiple of 2^-16. So `E[w'_i] = w_i` up to rounding.

    Args:
        rate: float, schedule or variable. Drop rate in [0, 1), read in every call. A schedule is a
            function from the training-call counter to a real scalar, such as a
            `keras.optimizers.schedules.LearningRateSchedule`. It must not be random. A rate of 0.0
            is the identity and draws nothing. A config stores a variable's current value. The
            caller must save the variable itself.
        noise_shape: Shape of the mask, as in `keras.layers.Dropout`. A 1 shares the mask along an
            axis, and None stands for the weight's own size. `(None, 1)` drops whole rows. Default
            None, for the weight's shape.
        per_example: bool. Draws a mask for each example, as Wan et al. published DropConnect:
            `w'_b = m_b w / keep` for example `b`. Axis 0 of the layer's inputs is the batch axis.
            All positions of an example share its mask. A mask depends on the seed, the weight's
            position, the call, the replica and the example's index in the batch. The kernels of
            `Dense` and `EinsumDense` support it, as the last parametrization of the weight. tfwd
            stores neither the masks nor the kernels of the examples. Default False, for one mask
            per batch.

    Raises:
        ValueError: On application, if the rate is not in [0, 1), or if the noise shape does not fit
            the weight. `Parametrized` raises it with the names of the layer and the weight. It also
            raises it if `per_example` is True for a layer or a weight that does not support it.
        ValueError: If `per_example` is True and a noise shape is given.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.parametrizations import Dropout
        >>> w = Dropout(0.5)(tf.ones([2, 4]), seed=tf.constant([1, 2]))
        >>> sorted(set(w.numpy().ravel().tolist()))
        [0.0, 2.0]
        >>> p = Dropout(0.5, per_example=True)
        >>> p.of_examples(tf.ones([2, 4]), seed=tf.constant([1, 2]), count=3).shape
        TensorShape([3, 2, 4])

    References: Wan et al., "Regularization of Neural Networks using DropConnect" (2013); Merity et
    al., "Regularizing and Optimizing LSTM Language Models" (2017). The first paper averages over
    masks at test time, as `tfwd.moment_matching` does. In evaluation tfwd uses the raw weight, as
    the second paper does.
    """

    elementwise = True

    def __init__(
        self,
        rate: parametrization_rates.Scalar,
        *,
        noise_shape: Sequence[int | None] | None = None,
        per_example: bool = False,
    ) -> None:
        self.rate = parametrization_rates.as_float_if_known(rate)
        self.noise_shape = None if noise_shape is None else tuple(noise_shape)
        self.per_example = bool(per_example)
        if self.per_example and self.noise_shape is not None:
            raise ValueError(
                f"Dropout: noise_shape={self.noise_shape} cannot be combined with "
                "per_example=True, which drops single entries: remove one of the two arguments"
            )

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        self.check("Dropout", tuple(weight.shape))
        if self.per_example:
            raise ValueError(
                f"{self!r} has no effective weight of a whole batch: call of_examples(weight, "
                "seed, count), which returns one for each example"
            )
        if self.is_identity:
            return weight
        return dropout_and_noise.dropout(weight, self.rate, seed, self._mask_shape(weight.shape))

    def of_rows(
        self, rows: tf.Tensor, seed: tf.Tensor, indices: tf.Tensor, shape: tuple[int, ...]
    ) -> tf.Tensor:
        return dropout_and_noise.dropout(
            rows, self.rate, seed, self._mask_shape(shape) or shape, indices
        )

    def of_examples(self, weight: tf.Tensor, seed: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
        self.check("Dropout", tuple(weight.shape))
        return example_masks.dropped(weight, self.rate, seed, count)

    def at(self, call: tf.Tensor) -> Dropout:
        return copy_with(self, rate=parametrization_rates.read(self.rate, call, below=1.0))

    def check(self, where: str, shape: tuple[int, ...] | None = None) -> None:
        parametrization_rates.check(where, "rate", self.rate, below=1.0)
        if shape is None or self.noise_shape is None:
            return
        fits = len(shape) == len(self.noise_shape) and all(
            n in (None, 1, size) for n, size in zip(self.noise_shape, shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"{where}: noise_shape {self.noise_shape} does not fit a weight of shape {shape}; "
                "it needs one entry per axis, each None, 1 or the axis's size"
            )

    @property
    def is_identity(self) -> bool:
        return (
            parametrization_rates.is_number(self.rate)
            and masks_and_normals.keep_probability(float(self.rate)) == 1.0
        )

    def get_config(self) -> dict[str, Any]:
        return {
            "rate": parametrization_rates.serialized(self.rate),
            "noise_shape": self.noise_shape,
            "per_example": self.per_example,
        }

    def __repr__(self) -> str:
        each = ", per_example=True" if self.per_example else ""
        return f"{type(self).__name__}(rate={self.rate!r}, noise_shape={self.noise_shape!r}{each})"

    def _mask_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        if self.noise_shape is None:
            return None
        sizes = zip(self.noise_shape, shape, strict=True)
        return tuple(size if n is None else n for n, size in sizes)
