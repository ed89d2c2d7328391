"""The time of an LSTM with weight dropout, forward and backward: ours, Keras's, PyTorch's.

    python benchmarks/lstm.py

Every framework gets two threads and finds the gradients of the input and of all weights. Ours and
PyTorch's draw a mask on the recurrent kernel in every run; Keras's, which cannot, is handed a
kernel that was dropped before. Runs alternate; each ratio is the median of the ratios of
neighbouring runs, with their quartiles.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
THREADS = 2

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import torch  # noqa: E402

from tfwd import layers  # noqa: E402

SIZES = {"small": (35, 20, 200, 200), "large": (70, 20, 400, 1150)}  # time, batch, input, units
RATE = 0.5
SECONDS = 20


def by_tensorflow(
    layer: keras.layers.LSTM, x: np.ndarray, upstream: np.ndarray, dropped: bool
) -> Callable[[], None]:
    """A step of a Keras layer; with `dropped` it is given a dropped recurrent kernel."""
    sequences, given = (tf.constant(a.transpose(1, 0, 2)) for a in (x, upstream))
    layer.build((x.shape[1], None, x.shape[2]))
    weights = [v.value for v in layer.trainable_variables]
    if dropped:
        weights[1] = tf.nn.dropout(weights[1], RATE)
        scope = keras.StatelessScope(list(zip(layer.trainable_variables, weights, strict=True)))
    else:
        scope = contextlib.nullcontext()

    # The time is left open, as in training on windows of random lengths.
    @tf.function(
        input_signature=[tf.TensorSpec([a.shape[0], None, a.shape[2]]) for a in (sequences, given)]
    )
    def step(sequences: tf.Tensor, given: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape, scope:
            tape.watch([sequences, *weights])
            y = layer(sequences, training=True)
        # The output is a result too, or a layer that computes it again in backward would save that.
        return [y, *tape.gradient(y, [sequences, *weights], output_gradients=given)]

    def run() -> None:
        for tensor in step(sequences, given):
            tensor.numpy()

    return run


def by_torch(x: np.ndarray, upstream: np.ndarray, units: int) -> Callable[[], None]:
    """A step of `torch.nn.LSTM` with dropout on `weight_hh`, put in as weight-drop programs do."""
    layer = torch.nn.LSTM(x.shape[2], units)
    raw = torch.nn.Parameter(layer.weight_hh_l0.detach().clone())
    del layer._parameters["weight_hh_l0"]
    layer.flatten_parameters = lambda: None
    sequences, given = torch.tensor(x, requires_grad=True), torch.tensor(upstream)
    parameters = [sequences, raw, *layer.parameters()]

    def run() -> None:
        for parameter in parameters:
            parameter.grad = None
        layer.weight_hh_l0 = torch.nn.functional.dropout(raw, RATE)
        layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the weights are not one piece of memory: no cuDNN
            y, _ = layer(sequences)
        y.backward(given)

    return run


def measure(runs: dict[str, Callable[[], None]], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of alternating runs of each."""
    for run in runs.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def quartiles(values: list[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    return [round(q, 3) for q in statistics.quantiles(values, n=4, method="inclusive")]


def main() -> None:
    """Times both sizes and prints a table and one line of JSON."""
    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    tf.config.threading.set_inter_op_parallelism_threads(THREADS)
    torch.set_num_threads(THREADS)
    generator, found = np.random.default_rng(0), {}
    print("| size | layer | median ms | its time over ours | quartiles |\n|---|---|---|---|---|")
    for size, (steps, batch, features, units) in SIZES.items():
        x = generator.normal(size=(steps, batch, features)).astype("float32")
        upstream = generator.normal(size=(steps, batch, units)).astype("float32")
        options = {"return_sequences": True, "seed": 1}
        own = layers.WeightDropLSTM(units, weight_dropout=RATE, **options)
        plain = keras.layers.LSTM(units, **options)
        runs = {
            "WeightDropLSTM": by_tensorflow(own, x, upstream, dropped=False),
            "keras, given a dropped kernel": by_tensorflow(plain, x, upstream, dropped=True),
            "torch, dropout on weight_hh": by_torch(x, upstream, units),
        }
        times = measure(runs, SECONDS)
        ours = times["WeightDropLSTM"]
        found[size] = {}
        for name, values in times.items():
            median = statistics.median(values)
            low, ratio, high = quartiles([b / a for a, b in zip(ours, values, strict=True)])
            found[size][name] = {"ms": round(median, 2), "over_ours": ratio, "spread": [low, high]}
            print(f"| {size} | {name} | {median:.1f} | {ratio:.2f} | {low:.2f} to {high:.2f} |")
    print(json.dumps({"benchmark": "lstm", "threads": THREADS, "sizes": found}))


if __name__ == "__main__":
    main()
