"""What the two moments say: the noise of the gradient, beside the gradient.

For a weight `w` with entries `i`, from `m_i = E[g_i]` and `s_i = E[g_i^2]` over a batch of `B`:

    variance   V = B/(B-1) sum_i (s_i - m_i^2)      trace of the covariance of an example's gradient
    signal     G = max(0, sum_i m_i^2 - V/B)        squared norm of the true gradient, unbiased
    noise scale  V / G        signal-to-noise ratio  G / V

The noise scale (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018) is about the
batch size beyond which larger batches stop paying off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfwd.gradients.moments import Moments

Record = dict[str, Any]


def compress(moments: Moments) -> tf.Tensor:
    """What `describe` needs of moments: float64 `[2, weights]`, the sums over the entries of
    `squared_mean` and of `mean^2`. A few numbers to fetch, whatever the model's size."""
    squares = [tf.reduce_sum(tf.cast(s, tf.float64)) for s in moments.squared_mean]
    means = [tf.reduce_sum(tf.square(tf.cast(m, tf.float64))) for m in moments.mean]
    return tf.stack([tf.stack(squares), tf.stack(means)])


def describe(sums: Any, paths: Sequence[str], sizes: Sequence[int], batch_size: int) -> Record:
    """The statistics of the whole model and of each weight.

    Args:
        sums: what `compress` gave.
        paths: the weights' paths.
        sizes: their numbers of entries.
        batch_size: the number of examples.

    Returns:
        A dict of `squared_mean` and `square_of_mean` (averaged over the entries), `noise_scale` and
        `signal_to_noise`, and under `variables` the same by path. With one example the last two
        are not known, and NaN.

    Example:

    >>> found = describe([[8.0], [4.0]], ["w"], [2], batch_size=2)
    >>> found["squared_mean"], found["square_of_mean"]
    (4.0, 2.0)
    >>> found["noise_scale"], found["signal_to_noise"]  # V = 8, G = 4 - 8/2 = 0
    (inf, 0.0)
    """
    squares, means = np.asarray(sums, np.float64)
    record = _one(float(squares.sum()), float(means.sum()), sum(sizes), batch_size)
    record["variables"] = {
        path: _one(float(s), float(m), size, batch_size)
        for path, s, m, size in zip(paths, squares, means, sizes, strict=True)
    }
    return record


def _one(squares: float, means: float, size: int, batch_size: int) -> Record:
    noise_scale = signal_to_noise = math.nan
    if batch_size > 1:
        variance = max(squares - means, 0.0) * batch_size / (batch_size - 1)
        signal = max(means - variance / batch_size, 0.0)
        if variance or signal:
            noise_scale = variance / signal if signal else math.inf
            signal_to_noise = signal / variance if variance else math.inf
    return {
        "squared_mean": squares / size,
        "square_of_mean": means / size,
        "noise_scale": noise_scale,
        "signal_to_noise": signal_to_noise,
    }
