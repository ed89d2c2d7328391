"""What decoupled decay costs in a step over 24 million weights, shaped as an AWD-LSTM's.

    python benchmarks/optimizers.py

Targets: the wrapped step takes at most 1.05 of the inner optimizer's own decay, where it has one,
and at most 1.25 of the inner optimizer alone for plain SGD. Beside them AdamW of PyTorch (foreach)
and of Optax (jitted, donated). Gradients are fixed; the sides run in turn; figures are medians over
rounds of the time, and of the ratio to the side named, with the middle half of the rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import numpy as np
import tensorflow as tf

from tfwd.optimizers import DecoupledWeightDecay

# A tied embedding of 10,000 words, LSTMs of 1150, 1150 and 400 units, the decoder's bias.
SHAPES = [
    (10_000, 400),
    *((400, 4600), (1150, 4600), (4600,)),
    *((1150, 4600), (1150, 4600), (4600,)),
    *((1150, 1600), (400, 1600), (1600,)),
    (10_000,),
]
RATE, DECAY = 1e-3, 1.2e-6
ROUNDS = 25


def arrays(seed: int) -> list[np.ndarray]:
    """Normal numbers in all the shapes, the same each time."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype("float32") for shape in SHAPES]


def in_keras(optimizer: keras.optimizers.Optimizer) -> Callable[[], None]:
    """A step of an optimizer, in a `tf.function`, on variables of its own."""
    weights = [keras.Variable(value) for value in arrays(0)]
    gradients = [tf.constant(value) for value in arrays(1)]
    optimizer.build(weights)
    step = tf.function(lambda: optimizer.apply(gradients, weights), autograph=False)

    def run() -> None:
        step()
        weights[-1].numpy()

    return run


def in_torch() -> Callable[[], None] | None:
    """PyTorch's AdamW, `None` without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    weights = [torch.nn.Parameter(torch.tensor(value)) for value in arrays(0)]
    for weight, gradient in zip(weights, arrays(1), strict=True):
        weight.grad = torch.tensor(gradient)
    return torch.optim.AdamW(weights, lr=RATE, weight_decay=DECAY, foreach=True).step


def in_optax() -> Callable[[], None] | None:
    """Optax's adamw in one compiled function, `None` without Optax."""
    try:
        import jax
        import optax
    except ImportError:
        return None
    optimizer = optax.adamw(RATE, weight_decay=DECAY)
    weights = [jax.numpy.asarray(value) for value in arrays(0)]
    gradients = [jax.numpy.asarray(value) for value in arrays(1)]

    def update(weights, state):
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    compiled = jax.jit(update, donate_argnums=(0, 1))
    held = [(weights, optimizer.init(weights))]

    def run() -> None:
        held[0] = jax.block_until_ready(compiled(*held[0]))

    return run


def sides() -> dict[str, Callable[[], None] | None]:
    """What is measured: name -> one step."""
    optimizers = keras.optimizers

    def wrapped(inner: keras.optimizers.Optimizer) -> DecoupledWeightDecay:
        return DecoupledWeightDecay(inner, DECAY, scale="learning_rate")

    return {
        "SGD alone": in_keras(optimizers.SGD(RATE)),
        "SGD, its own decay": in_keras(optimizers.SGD(RATE, weight_decay=DECAY)),
        "SGD, wrapped": in_keras(wrapped(optimizers.SGD(RATE))),
        "Adam alone": in_keras(optimizers.Adam(RATE)),
        "Keras's AdamW": in_keras(optimizers.AdamW(RATE, weight_decay=DECAY)),
        "Adam, wrapped": in_keras(wrapped(optimizers.Adam(RATE))),
        "PyTorch's AdamW": in_torch(),
        "Optax's adamw": in_optax(),
    }


RATIOS = {
    "SGD, wrapped / alone": ("SGD, wrapped", "SGD alone", 1.25),
    "SGD, wrapped / its own decay": ("SGD, wrapped", "SGD, its own decay", 1.05),
    "Adam, wrapped / Keras's AdamW": ("Adam, wrapped", "Keras's AdamW", 1.05),
    "Adam, wrapped / PyTorch's AdamW": ("Adam, wrapped", "PyTorch's AdamW", None),
    "Adam, wrapped / Optax's adamw": ("Adam, wrapped", "Optax's adamw", None),
}


def quartiles(values: list[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    return [round(value, 4) for value in statistics.quantiles(values, n=4)]


def main() -> None:
    """Measures, and prints a table and a line of JSON."""
    runs = {name: run for name, run in sides().items() if run is not None}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS + 3):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if number >= 3:  # the first trace and compile, and fill caches
                times[name].append(time.perf_counter() - begin)
    weights = sum(int(np.prod(shape)) for shape in SHAPES)
    print(f"{weights:,} weights, {ROUNDS} rounds; milliseconds a step: quarter, median, quarter")
    for name, values in times.items():
        print(f"  {name:<32} " + "  ".join(f"{1e3 * q:7.2f}" for q in quartiles(values)))
    ratios = {}
    for name, (one, other, target) in RATIOS.items():
        if one in times and other in times:
            pairs = zip(times[one], times[other], strict=True)
            ratios[name] = quartiles([a / b for a, b in pairs])
            aim = f"   target {target}" if target else ""
            print(f"  {name:<32} " + "  ".join(f"{q:7.3f}" for q in ratios[name]) + aim)
    print(
        json.dumps(
            {
                "benchmark": "optimizers",
                "weights": weights,
                "milliseconds": {n: round(1e3 * statistics.median(v), 3) for n, v in times.items()},
                "ratios": {name: values[1] for name, values in ratios.items()},
                "spread": {name: [values[0], values[2]] for name, values in ratios.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
