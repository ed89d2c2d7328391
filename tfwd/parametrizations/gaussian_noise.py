"""Variational noise."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from tfwd import random_masks, rates
from tfwd.parametrizations.base import Parametrization, changed


@keras.saving.register_keras_serializable("tfwd")
class GaussianNoise(Parametrization):
    """Variational noise: independent Gaussian noise on every entry.

    Formula: `w' = w + stddev * e` with `e ~ N(0, I)`, from training call `start_step` on; before,
    and where `stddev` is 0, `w' = w` bit for bit. With `scale="deviation"` it is
    `w' = w + stddev * s * e`, `s` being the standard deviation of the weight's entries (over n),
    for which the gradient takes it as a constant.

    Args:
        stddev: the standard deviation, at least 0: a float, a schedule or a variable, as the rate
            of `Dropout`. A float 0.0 draws nothing.
        start_step: the number of the first training call, counted from 0, that adds noise. Calls
            are counted by the layer that is wrapped, so that a layer called twice in a training
            step counts two.
        scale: "absolute", or "deviation" for noise in proportion to the weight's own deviation; a
            table is then perturbed as a whole, and not only the rows that are looked up.

    Raises:
        ValueError: `scale` is neither; when it is applied, if `stddev` is negative or not finite.

    Example:

    >>> w = GaussianNoise(0.1)(tf.zeros([1000]), seed=tf.constant([1, 2]))
    >>> round(float(tf.math.reduce_std(w)), 2)
    0.1

    References: Graves, "Practical Variational Inference for Neural Networks" (2011). One fixed
    deviation is used for all entries, as in speech recognition since; it is not learnt. Wu et al.,
    "NoisyTune: A Little Noise Can Help You Finetune Pretrained Language Models Better" (2022), add
    noise by each weight's deviation; theirs is uniform, and added once, before training.
    """

    elementwise = True

    def __init__(self, stddev: rates.Scalar, start_step: int = 0, scale: str = "absolute") -> None:
        if scale not in ("absolute", "deviation"):
            raise ValueError(
                f"GaussianNoise: scale={scale!r}: give 'absolute', or 'deviation' for noise in "
                "proportion to the weight's own deviation"
            )
        self.stddev = rates.constant(stddev)
        self.start_step = start_step
        self.scale = scale
        if scale == "deviation":
            self.by_rows = False  # which some rows do not tell

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        self.check("GaussianNoise")
        if self.is_identity:
            return weight
        stddev = self.stddev
        if self.scale == "deviation":
            wide = tf.cast(weight, tf.float64 if weight.dtype == tf.float64 else tf.float32)
            deviation = tf.cast(tf.math.reduce_std(tf.stop_gradient(wide)), tf.float32)
            stddev = tf.cast(stddev, tf.float32) * deviation
        return random_masks.noise(weight, stddev, seed)

    def of_rows(
        self, rows: tf.Tensor, seed: tf.Tensor, places: tf.Tensor, shape: tuple[int, ...]
    ) -> tf.Tensor:
        return random_masks.noise(rows, self.stddev, seed, places, shape)

    def at(self, call: tf.Tensor) -> GaussianNoise:
        stddev = rates.read(self.stddev, call, below=math.inf)
        if self.start_step > 0 and not self.is_identity:
            started = tf.cast(call >= self.start_step, tf.float32)
            stddev = tf.stop_gradient(tf.cast(stddev, tf.float32) * started)
        return changed(self, stddev=stddev, start_step=0)

    def check(self, where: str, shape: tuple[int, ...] | None = None) -> None:
        rates.check(where, "stddev", self.stddev, below=math.inf)
        if not isinstance(self.start_step, int) or self.start_step < 0:
            raise ValueError(
                f"{where}: start_step must be an integer of at least 0, got {self.start_step!r}"
            )

    @property
    def is_identity(self) -> bool:
        return rates.is_number(self.stddev) and float(self.stddev) == 0.0

    def get_config(self) -> dict[str, Any]:
        return {
            "stddev": rates.serialized(self.stddev),
            "start_step": self.start_step,
            "scale": self.scale,
        }
