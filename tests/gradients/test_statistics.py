"""The noise scale: against known noise, over batches, and beside regularizers."""

import math

import keras
import numpy as np
import pytest

from tfwd import gradients
from tfwd.gradients import argument_checks, statistics


def noisy(
    random: np.random.Generator, mu: np.ndarray, batch: int, same: float = 0.0
) -> statistics.Record:
    """Returns the statistics of gradients N(mu, 1) plus a part that all examples share."""
    each = mu + random.normal(size=(batch, mu.size))
    own = each.mean(0)
    sums = [(each**2).mean(0).sum(), ((own + same) ** 2).sum(), (own**2).sum()]
    return statistics.describe([[value] for value in sums], ["w"], [mu.size], batch)


def test_statistics_of_known_noise() -> None:
    """Checks that the noise scale of gradients N(mu, 1) is n / |mu|^2, to five standard errors.

    n is the number of entries.
    """
    random, batch, size = np.random.default_rng(0), 500, 400
    mu = random.normal(size=size)
    found = noisy(random, mu, batch)
    assert found["noise_scale"] == pytest.approx(size / np.sum(mu**2), rel=5 * 0.01)
    assert found["variables"]["w"]["signal_to_noise"] == pytest.approx(1 / found["noise_scale"])
    one = noisy(random, mu, 1)
    assert math.isnan(one["noise_scale"]) and math.isnan(one["variance"])


def test_average_of_batches_that_are_mostly_too_noisy() -> None:
    """Checks a small signal: the ratio of means is right, the mean of ratios is infinite."""
    random, batch, size, steps = np.random.default_rng(0), 4, 10, 4000
    mu = np.full(size, 0.2)
    records = [noisy(random, mu, batch) for _ in range(steps)]
    assert sum(math.isinf(record["noise_scale"]) for record in records) > steps / 10
    found = statistics.average(records)
    # The variance of one batch's G, from N(mu, 1/B) and V/B: 4 |mu|^2/B + 2n/(B(B-1)).
    error = math.sqrt((4 * np.sum(mu**2) / batch + 2 * size / (batch * (batch - 1))) / steps)
    assert found["signal"] == pytest.approx(np.sum(mu**2), abs=5 * error)
    assert found["variance"] == pytest.approx(size, rel=5 * math.sqrt(2 / (30 * steps)))
    assert found["noise_scale"] == found["variance"] / found["signal"]
    assert found["signal_to_noise"] == pytest.approx(1 / found["noise_scale"])
    same = found["variables"]["w"]
    assert same == {key: value for key, value in found.items() if key != "variables"}
    assert min(record["signal"] for record in records) < 0


def test_average_of_noisy_batches_of_single_examples_and_of_nan() -> None:
    random = np.random.default_rng(0)
    low = statistics.describe([[8.0], [1.0], [1.0]], ["w"], [2], 2)
    assert low["signal"] == 1 - 7.0
    found = statistics.average([low, low])
    assert (found["noise_scale"], found["signal_to_noise"]) == (math.inf, 0.0)
    one = noisy(random, np.ones(2), 1)
    found = statistics.average([low, one])
    assert found["variance"] == low["variance"] and found["signal"] == low["signal"]
    assert found["squared_mean"] == (low["squared_mean"] + one["squared_mean"]) / 2
    assert math.isnan(statistics.average([one])["noise_scale"])
    diverged = statistics.describe([[math.nan]] * 3, ["w"], [2], 2)
    assert math.isnan(statistics.average([low, diverged])["noise_scale"])
    with pytest.raises(ValueError, match="at least one record"):
        statistics.average([])


def test_regularizers_are_no_noise_and_are_signal() -> None:
    """Checks a gradient that is added to every example's: V stays, and G belongs to the sum."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(64, 3)).astype("f"), random.normal(size=(64, 2)).astype("f")
    chunk_size = 40 if argument_checks._activity_losses_are_means() else None
    found = {}
    for name, l2 in (("plain", None), ("regularized", keras.regularizers.L2(5.0))):
        keras.utils.set_random_seed(1)
        dense = keras.layers.Dense(2, kernel_regularizer=l2, activity_regularizer=l2)
        model = keras.Sequential([keras.Input((3,)), dense])
        moments = gradients.moments(model, x, y, "mse", chunk_size=chunk_size)
        found[name] = statistics.describe(statistics.compress(moments), ["w", "b"], [6, 2], 64)
        for mean, penalty in zip(moments.mean, moments.penalty, strict=True):
            assert (penalty is None) == (l2 is None)
            assert penalty is None or np.linalg.norm(penalty) > np.linalg.norm(mean - penalty)
        squares = sum(float(np.sum(np.square(mean))) for mean in moments.mean)
        signal = squares - found[name]["variance"] / 64
        assert found[name]["signal"] == pytest.approx(signal, rel=1e-5)
    assert found["plain"]["variance"] > 0
    assert found["regularized"]["variance"] == pytest.approx(found["plain"]["variance"], rel=1e-3)
    assert found["regularized"]["noise_scale"] < found["plain"]["noise_scale"] / 4
