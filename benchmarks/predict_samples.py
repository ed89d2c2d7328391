"""Monte Carlo predictions: `predict_samples` and a loop of `model(x, training=True)`.

    python benchmarks/predict_samples.py

All sides compute mean and standard deviation of 20 predictions with weight dropout, on one batch.
A user writes the loop in eager mode, or around a `tf.function`. The loop stores all predictions and
increases the training-call counters. In MobileNetV2 it also normalizes with the statistics of the
batch, and changes the moving statistics. The first call of `predict_samples`, which traces the
model, is measured once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from common import measure
from common.measure import Row, Spread

N = 20
OURS = "predict_samples"
EAGER = "the loop, eager"
TRACED = "the loop, traced"


def kinds() -> dict[str, Callable[[], tuple[Any, tuple[int, ...]]]]:
    """Returns a dict from a name to a function that returns a plain model and its input shape."""
    import keras

    def dense() -> tuple[Any, tuple[int, ...]]:
        layers = [keras.layers.Dense(1024, activation="relu") for _ in range(4)]
        return keras.Sequential([keras.Input((1024,)), *layers]), (64, 1024)

    def lstm() -> tuple[Any, tuple[int, ...]]:
        layers = [keras.layers.LSTM(256), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((50, 64)), *layers]), (64, 50, 64)

    def mobile_net() -> tuple[Any, tuple[int, ...]]:
        return keras.applications.MobileNetV2((96, 96, 3), weights=None), (16, 96, 96, 3)

    return {
        "4 Dense of 1024, batch 64": dense,
        "LSTM 256, time 50, batch 64": lstm,
        "MobileNetV2 at 96 x 96, batch 16": mobile_net,
    }


def sides(model: Any, x: Any) -> dict[str, Callable[[], Any]]:
    """Returns a dict from a name to a function that computes mean and standard deviation."""
    import numpy as np
    import tensorflow as tf

    import tfwd

    traced = tf.function(lambda x: model(x, training=True), autograph=False)

    def loop(call: Callable[[Any], Any]) -> tuple[Any, Any]:
        samples = np.stack([call(x).numpy() for _ in range(N)])
        return samples.mean(0), samples.std(0)

    return {
        OURS: lambda: tfwd.predict_samples(model, x, N, batch_size=len(x), verbose=0),
        EAGER: lambda: loop(lambda x: model(x, training=True)),
        TRACED: lambda: loop(traced),
    }


def main() -> None:
    """Measures all sides of each model, in turn."""
    options = measure.parser(__doc__, seconds=15.0, of="a model's rounds")
    seconds = options.parse_args().seconds
    measure.equal_threads()
    import tensorflow as tf

    import tfwd
    from tfwd import parametrizations

    rows = []
    for name, make in kinds().items():
        plain, shape = make()
        x = tf.random.stateless_normal(shape, [1, 2])
        dropped = {".*kernel": parametrizations.Dropout(0.1)}
        model = tfwd.parametrize(plain, dropped, seed=1)
        candidates = sides(model, x)
        begin = time.perf_counter()
        candidates[OURS]()
        first = 1e3 * (time.perf_counter() - begin)
        times = measure.alternate(candidates, seconds=seconds, rounds=40, least=5, title=name)
        claim = f"{N} predictions with weight dropout, {name}"
        rows.append(measure.time_over(claim, times, OURS, EAGER, at_most=1.0))
        rows.append(measure.time_over(claim, times, OURS, TRACED))
        median = measure.milliseconds(times)[OURS]
        figure = Spread.of([first / float(median)])
        rows.append(Row(f"the first call, {name}", figure, "time over a later call", first))
    measure.report("predict_samples", rows)


if __name__ == "__main__":
    main()
