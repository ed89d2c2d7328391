"""`Mixout`: weight dropout towards an earlier value of the weight instead of zero."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import parametrization_rates, pretrained
from tfwd._random import dropout_and_noise
from tfwd.parametrizations.base import copy_with
from tfwd.parametrizations.dropout import Dropout

_DTYPES = ("bfloat16", "float16", "float32", "float64")


# `layers.Mixout` is another class of the same name.
@keras.saving.register_keras_serializable("tfwd.parametrizations")
class Mixout(Dropout):
    """Weight dropout towards a reference: a dropped entry has the pretrained weight's value.

    Formula: with the reference `r`, and with `m_i ~ Bernoulli(keep)` and `keep` as in `Dropout`,

        w'_i = ((1 - m_i) r_i + m_i w_i - (1 - keep) r_i) / keep = r_i + m_i (w_i - r_i) / keep

    so that `E[w'_i] = w_i`. If `r = 0` it equals `Dropout`, with the same masks for an equal seed.
    The gradient for `w_i` is `m_i / keep`, and `r` gets no gradient. Half precision is computed in
    float32 and rounded once. A rate of 0 is the identity, bit for bit.

    The layer that applies it stores one copy of each reference. The layer does not count references
    as weights. They are saved with the weights, in Keras's files and in TensorFlow's checkpoints,
    so that training resumes with the same references. `tfwd.unwrap` removes them. Backward stores
    neither the mask nor the mixed weight.

    The copied references stay if the weights are set or loaded later. `set_weights`, `load_weights`
    and `tfwd.pretrained` then warn. `variable.assign`, a `tf.train.Checkpoint` of the plain layer,
    and callbacks of `fit` do not warn. `tfwd.reset_references(model)` copies the references again.

    Args:
        rate, noise_shape: As in `Dropout`. By default single entries are dropped. For a `Dense`
            kernel, `noise_shape=(None, 1)` drops all weights of an input together.
        towards: Reference. "start" is the value of the weight in the layer's first training call. A
            `tfwd.pretrained.Plan` supplies its file's value for the variable. A dict of arrays, or
            a file for `tfwd.pretrained`, supplies the value under the weight's path or its last
            components. Sources are read when the layer has its weights. A config always stores
            "start", because the model's file contains the references. Default "start".
        reference_dtype: str. dtype in which the reference is stored, such as "bfloat16". Default
            None, for the weight's dtype. float16 ends at 65504.

    Raises:
        ValueError: As `Dropout`; if `towards` or the dtype is wrong; if the source cannot be read,
            has no value with the weight's name and shape, or overflows in the dtype.
        tf.errors.InvalidArgumentError: If the start value overflows in float16. XLA drops this
            check.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.parametrizations import Mixout
        >>> start, now = tf.ones([2, 4]), tf.fill([2, 4], 3.0)
        >>> mixed = Mixout(0.5).towards_tensor(start)(now, seed=tf.constant([1, 2]))
        >>> sorted(set(mixed.numpy().ravel().tolist()))
        [1.0, 5.0]

    References: Lee, Cho and Kang, "Mixout: Effective Regularization to Finetune Large-scale
    Pretrained Language Models" (2020). Departure: the paper mixes weights of linear layers; tfwd
    mixes any weight.
    """

    elementwise = True
    by_rows = True
    has_reference = True

    def __init__(
        self,
        rate: parametrization_rates.Scalar,
        *,
        towards: Any = "start",
        noise_shape: Sequence[int | None] | None = None,
        reference_dtype: str | None = None,
    ) -> None:
        super().__init__(rate, noise_shape=noise_shape)
        if not isinstance(towards, (str, os.PathLike, Mapping, pretrained.Plan)):
            raise ValueError(
                f"Mixout: towards={towards!r}: expected 'start', a plan of tfwd.pretrained, a dict "
                "from a weight's path to an array, or a file of weights"
            )
        if reference_dtype not in (None, *_DTYPES):
            raise ValueError(
                f"Mixout: reference_dtype={reference_dtype!r}: expected one of "
                f"{', '.join(_DTYPES)}, or None for the weight's dtype"
            )
        self.towards = towards
        self.reference_dtype = reference_dtype

    def towards_tensor(self, reference: tf.Tensor) -> Mixout:
        return copy_with(self, towards=reference)

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        self.check("Mixout", tuple(weight.shape))
        if self.is_identity:
            return weight
        shape = self._mask_shape(weight.shape)
        return dropout_and_noise.mix(weight, self._reference(), self.rate, seed, shape)

    def of_rows(
        self, rows: tf.Tensor, seed: tf.Tensor, indices: tf.Tensor, shape: tuple[int, ...]
    ) -> tf.Tensor:
        mask_shape = self._mask_shape(shape) or shape
        return dropout_and_noise.mix(rows, self._reference(), self.rate, seed, mask_shape, indices)

    def _reference(self) -> tf.Tensor:
        if not tf.is_tensor(self.towards):
            raise ValueError(
                f"{self!r} has no reference tensor: a layer that applies it sets its reference; "
                "without a layer, call Mixout(rate).towards_tensor(reference)"
            )
        return self.towards

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["per_example"]
        return {**config, "towards": "start", "reference_dtype": self.reference_dtype}

    def __repr__(self) -> str:
        known = isinstance(self.towards, (str, os.PathLike))
        towards = repr(self.towards) if known else f"a {type(self.towards).__name__}"
        return (
            f"Mixout(rate={self.rate!r}, towards={towards}, noise_shape={self.noise_shape!r}, "
            f"reference_dtype={self.reference_dtype!r})"
        )
