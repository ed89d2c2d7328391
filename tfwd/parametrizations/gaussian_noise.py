"""`GaussianNoise`: variational noise."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from tfwd import dtypes, parametrization_rates
from tfwd._random import dropout_and_noise
from tfwd.parametrizations.base import Parametrization, copy_with

SCALES = ("absolute", "deviation")


def with_start_call(config: dict[str, Any]) -> dict[str, Any]:
    """Renames the key `start_step` of an older file's config to `start_call`."""
    if "start_step" not in config:
        return config
    return {
        **{k: v for k, v in config.items() if k != "start_step"},
        "start_call": config["start_step"],
    }


@keras.saving.register_keras_serializable("tfwd")
class GaussianNoise(Parametrization):
    """Variational noise: independent Gaussian noise on every entry.

    Formula: `w' = w + stddev * s * e` with `e ~ N(0, I)`, from training call `start_call` on.
    In earlier calls, and if `stddev` is 0, `w' = w` bit for bit. With `scale="absolute"` s is 1.
    With "deviation" s is the weight's own standard deviation,

        s = sqrt(mean((w - mean(w))^2)),

    over all entries of the raw weight. This holds even if other parametrizations come first, or if
    an embedding looks up only a few rows. The gradient treats s as a constant: `dw'/dw = 1`.
    A weight whose entries are all equal then gets no noise.

    Args:
        stddev: float, schedule or variable, as the rate of `Dropout`. Standard deviation, at least
            0. A float 0.0 draws nothing.
        start_call: int. Number of the first training call with noise, from 0. Default 0. The
            wrapped layer counts its calls, so a layer that is called twice in a training step
            counts two.
        scale: "absolute" or "deviation". Unit of `stddev`. Default "absolute".

    Raises:
        ValueError: If the scale is unknown. On application, if `stddev` is negative or not finite.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.parametrizations import GaussianNoise
        >>> w = GaussianNoise(0.1)(tf.zeros([1000]), seed=tf.constant([1, 2]))
        >>> round(float(tf.math.reduce_std(w)), 2)
        0.1

    References: Graves, "Practical Variational Inference for Neural Networks" (2011). All entries
    share one fixed deviation, which is not learnt, as in later work on speech recognition. Wu et
    al., "NoisyTune: A Little Noise Can Help You Finetune Pretrained Language Models Better" (2022),
    for the weight's own deviation. Departures: NoisyTune adds uniform noise once before training;
    tfwd draws Gaussian noise in each call.
    """

    elementwise = True

    def __init__(
        self, stddev: parametrization_rates.Scalar, *, start_call: int = 0, scale: str = "absolute"
    ) -> None:
        if scale not in SCALES:
            raise ValueError(f"GaussianNoise: scale={scale!r}: expected one of {', '.join(SCALES)}")
        self.stddev = parametrization_rates.as_float_if_known(stddev)
        self.start_call = start_call
        self.scale = scale
        self._deviation: tf.Tensor | None = None  # set for one weight by `of_weight`

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        self.check("GaussianNoise", tuple(weight.shape))
        if self.is_identity:
            return weight
        return dropout_and_noise.noise(weight, self._stddev(weight), seed)

    def of_rows(
        self, rows: tf.Tensor, seed: tf.Tensor, indices: tf.Tensor, shape: tuple[int, ...]
    ) -> tf.Tensor:
        return dropout_and_noise.noise(rows, self._stddev(None), seed, indices, shape)

    def of_weight(self, raw: tf.Tensor) -> GaussianNoise:
        if self.scale == "absolute" or self.is_identity:
            return self
        wide = tf.cast(tf.stop_gradient(raw), dtypes.wide(raw.dtype))
        return copy_with(self, _deviation=tf.math.reduce_std(wide))

    def _stddev(self, weight: tf.Tensor | None) -> parametrization_rates.Scalar:
        """Returns the standard deviation of the noise."""
        if self.scale == "absolute":
            return self.stddev
        if self._deviation is None:
            if weight is None:
                raise ValueError(
                    f"{self!r} got some rows of a weight, but its scale is the deviation of the "
                    "whole weight: call of_weight(weight) first"
                )
            return self.of_weight(weight)._stddev(None)
        if parametrization_rates.is_number(self.stddev):
            return self.stddev * self._deviation
        return tf.cast(self.stddev, self._deviation.dtype) * self._deviation

    def at(self, call: tf.Tensor) -> GaussianNoise:
        stddev = parametrization_rates.read(self.stddev, call, below=math.inf)
        if self.start_call > 0 and not self.is_identity:
            started = tf.cast(call >= self.start_call, tf.float32)
            stddev = tf.stop_gradient(tf.cast(stddev, tf.float32) * started)
        return copy_with(self, stddev=stddev, start_call=0)

    def check(self, where: str, shape: tuple[int, ...] | None = None) -> None:
        parametrization_rates.check(where, "stddev", self.stddev, below=math.inf)
        if not isinstance(self.start_call, int) or self.start_call < 0:
            raise ValueError(
                f"{where}: start_call must be an integer of at least 0, got {self.start_call!r}"
            )

    @property
    def is_identity(self) -> bool:
        return parametrization_rates.is_number(self.stddev) and float(self.stddev) == 0.0

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Parametrization:
        """Creates the noise from a config. Older configs have `start_step` for `start_call`."""
        return super().from_config(with_start_call(config))

    def get_config(self) -> dict[str, Any]:
        return {
            "stddev": parametrization_rates.serialized(self.stddev),
            "start_call": self.start_call,
            "scale": self.scale,
        }

    def __repr__(self) -> str:
        return (
            f"GaussianNoise(stddev={self.stddev!r}, start_call={self.start_call!r}, "
            f"scale={self.scale!r})"
        )
