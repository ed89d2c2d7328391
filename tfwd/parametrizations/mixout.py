"""Mixout: weight dropout towards what a weight was, and not towards zero."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import pretrained, rates
from tfwd.parametrizations.base import changed
from tfwd.parametrizations.dropout import Dropout

START = "start"
_DTYPES = ("bfloat16", "float16", "float32", "float64")


@keras.saving.register_keras_serializable("tfwd")
class Mixout(Dropout):
    """Weight dropout towards a reference: a dropped entry is that of the pretrained weight.

    Formula: with the reference `r`, `m_i ~ Bernoulli(keep)` and `keep` as in `Dropout`,

        w'_i = ((1 - m_i) r_i + m_i w_i - (1 - keep) r_i) / keep = r_i + m_i (w_i - r_i) / keep

    so that `E[w'_i] = w_i`. Where `r = 0` it is `Dropout`, with the very masks of an equal seed.

    The layer that applies it holds one copy of each reference. It is none of the layer's weights;
    it is saved with them, in `.keras` files and in TensorFlow's checkpoints, so that training goes
    on towards the same; and `tfwd.unwrap` leaves it behind. Backward keeps neither the mask nor the
    mixed weight.

    Args:
        rate, noise_shape: as in `Dropout`. The published one drops all weights of an input at once,
            `noise_shape=(None, 1)` of a `Dense` kernel, or single entries, which is the default.
        towards: the reference. "start": what the weight is in the layer's first training call. A
            `tfwd.pretrained.Plan`: what its file has for the variable. Or a dict of arrays, or a
            file that `tfwd.pretrained` reads: what they have under the weight's path, or an end of
            it. These are read when the layer has its weights; a config says "start" of a plan and
            of a dict, since the copies are in the file of the model.
        reference_dtype: in which the reference is held, as "bfloat16"; None for the weight's own.

    Raises:
        ValueError: as `Dropout`; there is no such dtype; or the source has no tensor of a weight's
            name and shape.

    Example:

    >>> start, now = tf.zeros([2, 4]), tf.ones([2, 4])
    >>> mixed = Mixout(0.5).towards_tensor(start)(now, seed=tf.constant([1, 2]))
    >>> sorted(set(mixed.numpy().ravel().tolist()))
    [0.0, 2.0]

    References: Lee, Cho and Kang, "Mixout: Effective Regularization to Finetune Large-scale
    Pretrained Language Models" (2020). Theirs mixes the weights of linear layers; here any weight.
    """

    elementwise = True
    by_rows = True
    has_reference = True

    def __init__(
        self,
        rate: rates.Scalar,
        towards: Any = START,
        noise_shape: Sequence[int | None] | None = None,
        reference_dtype: str | None = None,
    ) -> None:
        super().__init__(rate, noise_shape)
        known = isinstance(towards, (str, os.PathLike, Mapping, pretrained.Plan))
        if not known:
            raise ValueError(
                f"Mixout: towards={towards!r}: give 'start', a plan of tfwd.pretrained, a dict "
                "from a weight's path to an array, or a file of weights"
            )
        if reference_dtype not in (None, *_DTYPES):
            raise ValueError(
                f"Mixout: reference_dtype={reference_dtype!r}: give one of {', '.join(_DTYPES)}, "
                "or None for the weight's own"
            )
        self.towards = os.fspath(towards) if isinstance(towards, os.PathLike) else towards
        self.reference_dtype = reference_dtype

    def towards_tensor(self, reference: tf.Tensor) -> Mixout:
        """The same, towards a tensor; of a lookup's rows, towards those rows."""
        return changed(self, towards=tf.stop_gradient(reference))

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        if self.is_identity:
            return weight
        reference = self._reference(weight)
        return reference + super().__call__(weight - reference, seed)

    def of_rows(
        self, rows: tf.Tensor, seed: tf.Tensor, places: tf.Tensor, shape: tuple[int, ...]
    ) -> tf.Tensor:
        reference = self._reference(rows)
        return reference + super().of_rows(rows - reference, seed, places, shape)

    def _reference(self, weight: tf.Tensor) -> tf.Tensor:
        if not tf.is_tensor(self.towards):
            raise ValueError(
                f"Mixout(towards={self.towards!r}) has no tensor to mix with here: a layer that "
                "applies it gives it one; by hand, Mixout(rate).towards_tensor(reference)"
            )
        return tf.cast(self.towards, weight.dtype)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "towards": self.towards if isinstance(self.towards, str) else START,
            "reference_dtype": self.reference_dtype,
        }
