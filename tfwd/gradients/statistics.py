"""Noise scale and signal-to-noise ratio of the gradient, estimated from the two moments.

The estimates are for a weight `w` with entries `i`, and a batch of `B` examples. They need
`m_i = E[g_i]` and `s_i = E[g_i^2]` over the batch, and `r_i`. `r_i` is the part of `m_i` that is
the same for every example (regularizers):

    variance   V = B/(B-1) sum_i (s_i - (m_i - r_i)^2)    trace of an example's covariance
    signal     G = sum_i m_i^2 - V/B                      squared norm of the true gradient
    noise scale  V / G        signal-to-noise ratio  G / V

The noise scale is about the batch size above which larger batches bring little. `V` and `G` are
unbiased: their means over batches approach the true values. `V/G` is biased, and the mean of such
ratios is meaningless. The `G` of one batch varies by up to `sqrt(2) V/B`, even if the true gradient
is zero. It can be negative. Over several batches, the noise scale is therefore `mean(V) / mean(G)`.
Only a negative mean is replaced by zero. The noise scale is then infinite: the gradient is too
noisy.

Reference: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1.
Their estimators are the same if the small batch has one example and the large batch has `B`:
`(B sum m^2 - sum s) / (B-1)` for the signal, and `(sum s - sum m^2) / (1 - 1/B)` for the variance.
They also average both estimates before the division, with a moving average over steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfwd.gradients.compute_moments import Moments

Record = dict[str, Any]

ESTIMATES = ("squared_mean", "square_of_mean", "variance", "signal")


def compress(moments: Moments) -> tf.Tensor:
    """Reduces moments to the few numbers that `describe` needs, for any size of the model.

    Args:
        moments: Moments of a batch.

    Returns:
        float64 `[3, weights]`: the sums over the entries of `mean_square`, of `mean^2`, and of the
        square of `mean` without the `penalty`.
    """
    squares = [tf.reduce_sum(tf.cast(s, tf.float64)) for s in moments.mean_square]
    means = [_squared_norm(m) for m in moments.mean]
    own = list(means)
    for index, penalty in enumerate(moments.penalty or ()):
        if penalty is not None:
            own[index] = _squared_norm(moments.mean[index] - penalty)
    return tf.stack([tf.stack(squares), tf.stack(means), tf.stack(own)])


def describe(sums: Any, paths: Sequence[str], sizes: Sequence[int], batch_size: int) -> Record:
    """Returns the statistics of the whole model and of each weight, from one batch.

    Args:
        sums: Result of `compress`.
        paths: Paths of the weights.
        sizes: Numbers of entries of the weights.
        batch_size: int. Number of examples.

    Returns:
        A dict with `squared_mean` and `square_of_mean` (averaged over the entries), `variance` and
        `signal` (V and G, summed over the entries; G can be negative), `noise_scale` and
        `signal_to_noise`. `variables` has a dict of the same statistics for each path. With one
        example, `variance`, `signal`, `noise_scale` and `signal_to_noise` are unknown, and NaN.

    Example:
        >>> found = describe([[8.0], [4.0], [4.0]], ["w"], [2], batch_size=2)
        >>> found["squared_mean"], found["square_of_mean"]
        (4.0, 2.0)
        >>> found["variance"], found["signal"]  # 2 (8 - 4) and 4 - 8/2
        (8.0, 0.0)
        >>> found["noise_scale"], found["signal_to_noise"]
        (inf, 0.0)
    """
    table = np.asarray(sums, np.float64)
    record = _estimates(table.sum(1), sum(sizes), batch_size)
    record["variables"] = {
        path: _estimates(column, size, batch_size)
        for path, column, size in zip(paths, table.T, sizes, strict=True)
    }
    return record


def average(records: Sequence[Record]) -> Record:
    """Returns the statistics over several batches, as ratios of means.

    Args:
        records: Results of `describe` for each batch, or `GradientSquaredMean.records`; at least
            one. A batch with one example contributes only to the first two means.

    Returns:
        A dict as from `describe`: the means of `squared_mean`, `square_of_mean`, `variance` and
        `signal`, `noise_scale = mean(V) / mean(G)`, and `signal_to_noise = mean(G) / mean(V)`.

    Raises:
        ValueError: If there are no records.

    Example:
        >>> one = describe([[8.0], [4.0], [4.0]], ["w"], [2], batch_size=2)  # V = 8, G = 0
        >>> two = describe([[8.0], [6.0], [6.0]], ["w"], [2], batch_size=2)  # V = 4, G = 4
        >>> average([one, two])["noise_scale"]  # (8 + 4) / (0 + 4)
        3.0
    """
    if not records:
        raise ValueError("records is empty: average() needs at least one record")
    record = _average(records)
    record["variables"] = {
        path: _average([record["variables"][path] for record in records])
        for path in records[0]["variables"]
    }
    return record


def _squared_norm(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(tf.cast(tensor, tf.float64)))


def _estimates(sums: np.ndarray, size: int, batch_size: int) -> Record:
    squares, means, own = (float(value) for value in sums)
    variance = signal = math.nan
    if batch_size > 1:
        # The difference is negative only because of rounding.
        variance = max(squares - own, 0.0) * batch_size / (batch_size - 1)
        signal = means - variance / batch_size
    return _with_ratios([squares / size, means / size, variance, signal])


def _average(records: Sequence[Record]) -> Record:
    # Records of one example are left out, but not records with a NaN gradient.
    known = [r for r in records if not math.isnan(r["variance"]) or _diverged(r)]
    means = [_mean(records, key) for key in ESTIMATES[:2]]
    return _with_ratios(means + [_mean(known, key) for key in ESTIMATES[2:]])


def _diverged(record: Record) -> bool:
    return not math.isfinite(record["squared_mean"])


def _mean(records: Sequence[Record], key: str) -> float:
    return sum(record[key] for record in records) / len(records) if records else math.nan


def _with_ratios(estimates: list[float]) -> Record:
    record = dict(zip(ESTIMATES, estimates, strict=True))
    variance, signal = record["variance"], max(record["signal"], 0.0)
    noise_scale = signal_to_noise = math.nan
    if variance or signal:
        noise_scale = variance / signal if signal else math.inf
        signal_to_noise = signal / variance if variance else math.inf
    return {**record, "noise_scale": noise_scale, "signal_to_noise": signal_to_noise}
