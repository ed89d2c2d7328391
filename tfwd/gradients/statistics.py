"""Noise scale and signal-to-noise ratio of the gradient, estimated from the two moments.

For a weight `w` with entries `i`, from `m_i = E[g_i]` and `s_i = E[g_i^2]` over a batch of `B`, and
`r_i`, the part of `m_i` that is the same for every example (regularizers):

    variance   V = B/(B-1) sum_i (s_i - (m_i - r_i)^2)    trace of the covariance of an example's
    signal     G = sum_i m_i^2 - V/B                      squared norm of the true gradient
    noise scale  V / G        signal-to-noise ratio  G / V

The noise scale is about the batch size beyond which larger batches stop paying off. `V` and `G` are
unbiased: their means over batches tend to what they estimate. `V/G` is not, and the mean of such
ratios means nothing: the `G` of one batch scatters, by up to `sqrt(2) V/B` even where the true
gradient is zero, and can be zero or less. So over several batches the noise scale is
`mean(V) / mean(G)`, and only what is below zero then is taken for zero: a noise scale of infinity,
too noisy to tell.

Reference: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1.
With their small batch a single example and their large one all `B`, their estimators are these:
`(B sum m^2 - sum s) / (B-1)` of the signal and `(sum s - sum m^2) / (1 - 1/B)` of the variance, and
they too average both before they divide. There the average is one that moves with the steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfwd.gradients.batch_moments import Moments

Record = dict[str, Any]

ESTIMATES = ("squared_mean", "square_of_mean", "variance", "signal")


def compress(moments: Moments) -> tf.Tensor:
    """What `describe` needs of moments: a few numbers to fetch, whatever the model's size.

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
        sums: what `compress` gave.
        paths: the weights' paths.
        sizes: their numbers of entries.
        batch_size: the number of examples.

    Returns:
        A dict of `squared_mean` and `square_of_mean` (averaged over the entries), `variance` and
        `signal` (V and G, summed over them; G can be below zero), `noise_scale` and
        `signal_to_noise`, and under `variables` the same by path. With one example the last four
        are not known, and NaN.

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
    """Returns the statistics over several batches: ratios of means, where one batch is too noisy to tell.

    Args:
        records: what `describe` gave for each batch, or `GradientSquaredMean.records`; at least
            one. Batches of one example count for what they know.

    Returns:
        As of `describe`: the means of the first four, and `noise_scale = mean(V) / mean(G)`,
        `signal_to_noise = mean(G) / mean(V)`.

    Raises:
        ValueError: if there are no records.

    Example:

    >>> one = describe([[8.0], [4.0], [4.0]], ["w"], [2], batch_size=2)  # V = 8, G = 0
    >>> two = describe([[8.0], [6.0], [6.0]], ["w"], [2], batch_size=2)  # V = 4, G = 4
    >>> average([one, two])["noise_scale"]  # (8 + 4) / (0 + 4)
    3.0
    """
    if not records:
        raise ValueError("average() needs at least one record")
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
        # Below zero only by rounding.
        variance = max(squares - own, 0.0) * batch_size / (batch_size - 1)
        signal = means - variance / batch_size
    return _with_ratios([squares / size, means / size, variance, signal])


def _average(records: Sequence[Record]) -> Record:
    # What one example leaves unknown is left out; what is NaN because the gradient was is kept.
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
