"""Mixout: weight dropout towards what a weight was, and not towards zero."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import pretrained, rates
from tfwd._random import random_masks
from tfwd.parametrizations.base import changed
from tfwd.parametrizations.dropout import Dropout

_DTYPES = ("bfloat16", "float16", "float32", "float64")


# `layers.Mixout` is another class of the same name.
@keras.saving.register_keras_serializable("tfwd.parametrizations")
class Mixout(Dropout):
    """Weight dropout towards a reference: a dropped entry is that of the pretrained weight.

    Formula: with the reference `r`, `m_i ~ Bernoulli(keep)` and `keep` as in `Dropout`,

        w'_i = ((1 - m_i) r_i + m_i w_i - (1 - keep) r_i) / keep = r_i + m_i (w_i - r_i) / keep

    so that `E[w'_i] = w_i`. Where `r = 0` it is `Dropout`, with the very masks of an equal seed.
    The gradient for `w_i` is `m_i / keep`, and there is none for `r`. Half precision is computed in
    float32 and rounded once. A rate of 0 is the identity, bit for bit.

    The layer that applies it holds one copy of each reference. It is none of the layer's weights;
    it is saved with them, in Keras's files and in TensorFlow's checkpoints, so that training goes
    on towards the same; and `tfwd.unwrap` leaves it behind. Backward keeps neither the mask nor the
    mixed weight.

    Args:
        rate, noise_shape: as in `Dropout`. Single entries are dropped by default;
            `noise_shape=(None, 1)` of a `Dense` kernel drops all weights of an input at once.
        towards: the reference. "start": what the weight is in the layer's first training call. A
            `tfwd.pretrained.Plan`: what its file has for the variable. Or a dict of arrays, or a
            file that `tfwd.pretrained` reads: what they have under the weight's path, or an end of
            it. Sources are read when the layer has its weights. A config says "start" whatever was
            given; the file of the model has the references themselves.
        reference_dtype: in which the reference is held, as "bfloat16"; None for the weight's own.

    Raises:
        ValueError: as `Dropout`; towards or the dtype is none of these; the source cannot be read,
            or has nothing of a weight's name and shape.

    Example:

    >>> start, now = tf.ones([2, 4]), tf.fill([2, 4], 3.0)
    >>> mixed = Mixout(0.5).towards_tensor(start)(now, seed=tf.constant([1, 2]))
    >>> sorted(set(mixed.numpy().ravel().tolist()))
    [1.0, 5.0]

    References: Lee, Cho and Kang, "Mixout: Effective Regularization to Finetune Large-scale
    Pretrained Language Models" (2020). Theirs mixes weights of linear layers; here any weight.
    """

    elementwise = True
    by_rows = True
    has_reference = True

    def __init__(
        self,
        rate: rates.Scalar,
        towards: Any = "start",
        noise_shape: Sequence[int | None] | None = None,
        reference_dtype: str | None = None,
    ) -> None:
        super().__init__(rate, noise_shape)
        if not isinstance(towards, (str, os.PathLike, Mapping, pretrained.Plan)):
            raise ValueError(
                f"Mixout: towards={towards!r}: give 'start', a plan of tfwd.pretrained, a dict "
                "from a weight's path to an array, or a file of weights"
            )
        if reference_dtype not in (None, *_DTYPES):
            raise ValueError(
                f"Mixout: reference_dtype={reference_dtype!r}: give one of {', '.join(_DTYPES)}, "
                "or None for the weight's own"
            )
        self.towards = towards
        self.reference_dtype = reference_dtype

    def towards_tensor(self, reference: tf.Tensor) -> Mixout:
        return changed(self, towards=reference)

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        self.check("Mixout", tuple(weight.shape))
        if self.is_identity:
            return weight
        shape = self._mask_shape(weight.shape)
        return random_masks.mix(weight, self._reference(), self.rate, seed, shape)

    def of_rows(
        self, rows: tf.Tensor, seed: tf.Tensor, places: tf.Tensor, shape: tuple[int, ...]
    ) -> tf.Tensor:
        mask_shape = self._mask_shape(shape) or shape
        return random_masks.mix(rows, self._reference(), self.rate, seed, mask_shape, places)

    def _reference(self) -> tf.Tensor:
        if not tf.is_tensor(self.towards):
            raise ValueError(
                f"{self!r} has no tensor to mix with here: a layer that applies it gives it one; "
                "by hand, Mixout(rate).towards_tensor(reference)"
            )
        return self.towards

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "towards": "start",
            "reference_dtype": self.reference_dtype,
        }

    def __repr__(self) -> str:
        known = isinstance(self.towards, (str, os.PathLike))
        towards = repr(self.towards) if known else f"a {type(self.towards).__name__}"
        return (
            f"Mixout(rate={self.rate!r}, towards={towards}, noise_shape={self.noise_shape!r}, "
            f"reference_dtype={self.reference_dtype!r})"
        )
