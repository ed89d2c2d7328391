"""Learning rate of each step and of each layer."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf


def warmup_steps(steps: int, share: float) -> int:
    """Returns the number of warm-up steps: `share * steps`, rounded, and less than `steps`."""
    return min(round(share * steps), max(steps - 1, 0))


def factor(step: Any, steps: int, warmup: int, linear: bool = True) -> tf.Tensor:
    """Returns the factor of the learning rate in a step.

    Formula: with k the number of the step from 0, T all steps and W the steps of the warm-up,

        (k + 1) / W           for k < W,
        (T - k) / (T - W)     from then on, but not below 0; 1 if not `linear`.

    The rate is highest in steps W - 1 and W, and no step has a rate of 0. Hugging Face's linear
    schedule has k / W instead of (k + 1) / W, so its first step changes nothing.

    Args:
        step: int or integer tensor. The number k of the step.
        steps: int. The number T of all steps.
        warmup: int. The number W of warm-up steps, less than T.
        linear: bool. True lowers the rate after the warm-up. False keeps the rate constant.

    Returns:
        A float32 scalar.

    Example:
    >>> [round(float(factor(k, 6, 2)), 2) for k in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    step = tf.cast(step, tf.float32)
    rising = (step + 1) / max(warmup, 1)
    falling = tf.maximum((steps - step) / max(steps - warmup, 1), 0.0) if linear else tf.ones([])
    return tf.where(step < warmup, rising, falling)


_LAYER = re.compile(r"encoder/stack/layer_(\d+)/")


def layer_factors(names: list[str], layers: int, decay: float) -> dict[str, float]:
    """Returns the factor of each weight's learning rate. Lower layers have smaller factors.

    Formula: `decay ** (L - i)` for layer i of L, from 0; `decay ** (L + 1)` for the embeddings; 1
    for pooler and head.

    Args:
        names: the names of the weights, from `model.named_weights`.
        layers: int. The number L of layers.
        decay: float. The factor from a layer to the layer below.

    Example:
    >>> layer_factors(["encoder/stack/layer_1/output/bias", "encoder/embeddings/words"], 2, 0.5)
    {'encoder/stack/layer_1/output/bias': 0.5, 'encoder/embeddings/words': 0.125}

    References: Howard and Ruder, "Universal Language Model Fine-tuning" (2018); Clark et al.,
    "ELECTRA" (2020), whose program starts one factor lower.
    """
    factors = {}
    for name in names:
        found = _LAYER.match(name)
        below = layers - int(found[1]) if found else 0
        if name.startswith("encoder/embeddings"):
            below = layers + 1
        factors[name] = decay**below
    return factors
