"""What both moments of per-example gradients cost over a plain gradient, ours and the peers'.

    python benchmarks/gradient_moments.py [names of cases ..]

For each case a plain gradient and all ways to both moments run in turns on the same work; what is
printed is the median of the ratios to the plain gradient of the same framework, and their
quartiles. Peers are BackPACK (`SumGradSquared`), PyTorch's `torch.func.vmap` and Opacus, as far as
they are installed and can; a peer that needs more than MOST_SECONDS for a run is timed once, and
those that hold every example's gradient are left out where that is more than MOST_BYTES.
Last, the growth of our time with the batch from 8 to 1024. Ends with one line of JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from tfwd import gradients, layers

MOST_SECONDS = 1.0
MOST_BYTES = 1 << 30
SECONDS = 1.2  # for the rounds of a framework in a case
BLOCKS = 3
L = keras.layers
RANDOM = np.random.default_rng(0)

Runs = dict[str, Callable[[], Any]]


def mlp(widths: list[int], batch: int) -> tuple:
    """Dense layers and ten classes; as of all cases, the model, inputs and targets."""
    hidden = [L.Dense(width, "relu") for width in widths[1:]]
    stack = [keras.Input((widths[0],)), *hidden, L.Dense(10)]
    return keras.Sequential(stack), floats(batch, widths[0]), ids(10, batch)


def sequence() -> tuple:
    """Dense layers at each of many positions."""
    stack = [keras.Input((64, 128)), L.Dense(256, "relu"), L.Dense(256, "relu"), L.Dense(10)]
    return keras.Sequential(stack), floats(32, 64, 128), ids(10, 32, 64)


def convolutions() -> tuple:
    """Two convolutions on small images."""
    options = {"padding": "same", "activation": "relu"}
    stack = [L.Conv2D(32, 3, **options), L.Conv2D(64, 3, **options), L.GlobalAveragePooling2D()]
    model = keras.Sequential([keras.Input((32, 32, 3)), *stack, L.Dense(10)])
    return model, floats(32, 32, 32, 3), ids(10, 32)


def embedding() -> tuple:
    """An embedding and a class at each position."""
    stack = [keras.Input((32,), dtype="int32"), L.Embedding(2000, 64), L.Dense(10)]
    return keras.Sequential(stack), ids(2000, 64, 32), ids(10, 64, 32)


def lstm() -> tuple:
    """One recurrent layer."""
    stack = [keras.Input((32, 64)), L.LSTM(128), L.Dense(10)]
    return keras.Sequential(stack), floats(16, 32, 64), ids(10, 16)


def language_model() -> tuple:
    """The quickstart's layers: an embedding of 4,522 words, LSTMs of 256 and 128, tied."""
    table = L.Embedding(4522, 128)
    lstms = [L.LSTM(units, return_sequences=True) for units in (256, 128)]
    stack = [keras.Input((35,), dtype="int32"), table, *lstms, layers.TiedDense(table)]
    return keras.Sequential(stack), ids(4522, 32, 35), ids(4522, 32, 35)


CASES: dict[str, tuple[str, Callable[[], tuple]]] = {
    "mlp": ("MLP 784-512-512-10, batch 256", lambda: mlp([784, 512, 512], 256)),
    "wide": ("MLP 4 x 1024, batch 256", lambda: mlp([1024] * 5, 256)),
    "sequence": ("Dense 128-256-256-10, batch 32, time 64", sequence),
    "conv": ("convolutions 3-32-64 on 32 x 32, batch 32", convolutions),
    "embedding": ("Embedding 2000 x 64 and a Dense, batch 64, time 32", embedding),
    "lstm": ("LSTM 64 to 128, time 32, batch 16", lstm),
    "lm": ("the quickstart language model, batch 32, time 35", language_model),
}


def floats(*shape: int) -> np.ndarray:
    """Inputs."""
    return RANDOM.normal(size=shape).astype("float32")


def ids(count: int, *shape: int) -> np.ndarray:
    """Words or classes."""
    return RANDOM.integers(0, count, size=shape).astype("int32")


def ours(model: keras.Model, x: np.ndarray, y: np.ndarray) -> tuple[Runs, list]:
    """A plain gradient, and both moments; and the latter's results."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    given = tf.constant(x), tf.constant(y)

    @tf.function
    def plain(x: tf.Tensor, y: tf.Tensor) -> list:
        with tf.GradientTape() as tape:
            value = loss(y, model(x))
        found = tape.gradient(value, [v.value for v in model.trainable_variables])
        return [tf.convert_to_tensor(gradient) for gradient in found]

    @tf.function
    def moments(x: tf.Tensor, y: tf.Tensor) -> list:
        found = gradients.squared_mean(model, x, y, loss)
        return [*found.mean, *found.squared_mean]

    runs: Runs = {
        "plain": lambda: plain(*given)[-1].numpy(),
        "tfwd": lambda: moments(*given)[-1].numpy(),
    }
    return runs, [np.asarray(m) for m in moments(*given)]


def torch_model(name: str) -> Any:
    """The same layers in PyTorch; None for what is not tied there alike."""
    import torch
    from torch import nn

    class Pool(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.mean((2, 3))

    class Last(nn.Module):
        def forward(self, x: Any) -> Any:
            return x[0][:, -1]

    def dense(widths: list[int]) -> list:
        stack = []
        for a, b in itertools.pairwise(widths):
            stack += [nn.Linear(a, b), nn.ReLU()]
        return [*stack, nn.Linear(widths[-1], 10)]

    torch.manual_seed(0)
    made = {
        "mlp": lambda: dense([784, 512, 512]),
        "wide": lambda: dense([1024] * 5),
        "sequence": lambda: dense([128, 256, 256]),
        "conv": lambda: [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(),
                         nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), Pool(), nn.Linear(64, 10)],
        "embedding": lambda: [nn.Embedding(2000, 64), nn.Linear(64, 10)],
        "lstm": lambda: [nn.LSTM(64, 128, batch_first=True), Last(), nn.Linear(128, 10)],
    }  # fmt: skip
    return nn.Sequential(*made[name]()) if name in made else None


def peers(name: str, x: np.ndarray, y: np.ndarray) -> Runs:
    """What of the peers is installed and has a way for the case."""
    try:
        import torch
    except ImportError:
        return {}
    model = torch_model(name)
    if model is None:
        return {}
    if name == "conv":
        x = x.transpose(0, 3, 1, 2).copy()
    integer = x.dtype.kind == "i"
    given = torch.from_numpy(x).long() if integer else torch.from_numpy(x)
    target = torch.from_numpy(y).long()
    loss = torch.nn.CrossEntropyLoss()

    def value(out: Any, wanted: Any) -> Any:
        return loss(out.reshape(-1, out.shape[-1]), wanted.reshape(-1))

    def plain() -> None:
        model.zero_grad()
        value(model(given), target).backward()

    parameters = {k: v.detach() for k, v in model.named_parameters()}

    def single(p: Any, one: Any, wanted: Any) -> Any:
        return value(torch.func.functional_call(model, p, (one[None],)), wanted[None])

    each = torch.func.vmap(torch.func.grad(single), in_dims=(None, 0, 0))

    def vmap() -> list:
        return [(g.mean(0), (g * g).mean(0)) for g in each(parameters, given, target).values()]

    runs: Runs = {"torch plain": plain}
    held = 4 * len(x) * sum(p.numel() for p in model.parameters()) <= MOST_BYTES
    if held:
        runs["torch vmap"] = vmap
    try:
        from backpack import backpack, extend
        from backpack.extensions import SumGradSquared

        extended = extend(torch_model(name))
        extended_loss = extend(torch.nn.CrossEntropyLoss())

        def with_backpack() -> None:
            out = extended(given)
            if out.dim() > 2:
                raise NotImplementedError("BackPACK's cross entropy takes [batch, classes]")
            with backpack(SumGradSquared()):
                extended_loss(out, target).backward()

        runs["BackPACK"] = with_backpack
    except ImportError:
        pass
    try:
        from opacus import GradSampleModule

        watched = GradSampleModule(torch_model(name))

        def with_opacus() -> list:
            watched.zero_grad()
            value(watched(given), target).backward()
            samples = [p.grad_sample for p in watched.parameters()]
            return [(g.mean(0), (g * g).mean(0)) for g in samples]

        if held:
            runs["Opacus"] = with_opacus
    except ImportError:
        pass
    return runs


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one run."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def alternate(groups: list[Runs]) -> dict[str, list[float]]:
    """The times of each; what fails is left out, and what is slow runs once.

    Frameworks take turns in blocks, each begun with a run that is not timed, since the threads of
    one go on for a while when another begins; within a block the runs take turns, in an order that
    is turned round each time.
    """
    times: dict[str, list[float]] = {}
    for runs in groups:
        for name, run in list(runs.items()):
            try:
                first, second = timed(run), timed(run)
            except Exception as error:  # a peer that cannot do a case says so in its own way
                print(f"    {name}: {type(error).__name__}: {str(error).splitlines()[0][:60]}")
                del runs[name]
                continue
            times[name] = [second] if min(first, second) > MOST_SECONDS else []
    slow = {name for name, found in times.items() if found}
    for _ in range(BLOCKS):
        for runs in groups:
            quick = [name for name in runs if name not in slow]
            end, rounds = time.perf_counter() + SECONDS / BLOCKS, 0
            for name in quick:
                timed(runs[name])
            while rounds < 3 or time.perf_counter() < end:
                for name in quick if rounds % 2 else quick[::-1]:
                    times[name].append(timed(runs[name]))
                rounds += 1
    return times


def ratio(times: list[float], plain: list[float]) -> list[float]:
    """Median and quartiles of the ratios within a round."""
    if len(times) == 1:
        return [times[0] / statistics.median(plain)] * 3
    ratios = [a / b for a, b in zip(times, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return [middle, low, high]


def growth() -> dict[str, Any]:
    """The exponent of the time of the MLP in the batch, by least squares on logarithms."""
    batches, seconds = [8, 32, 128, 512, 1024], []
    for batch in batches:
        runs, _ = ours(*mlp([784, 512, 512], batch))
        runs["tfwd"]()
        seconds.append(statistics.median(timed(runs["tfwd"]) for _ in range(15)))
    exponent = float(np.polyfit(np.log(batches), np.log(seconds), 1)[0])
    return {"batches": batches, "milliseconds": [1e3 * s for s in seconds], "exponent": exponent}


def main() -> None:
    """Runs the cases that are named on the command line, or all."""
    results: dict[str, Any] = {}
    for name in sys.argv[1:] or CASES:
        title, make = CASES[name]
        print(title)
        model, x, y = make()
        runs, _ = ours(model, x, y)
        times = alternate([runs, peers(name, x, y)])
        results[name] = {"plain_ms": 1e3 * statistics.median(times["plain"])}
        for other in times:
            if other.endswith("plain"):
                continue
            base = times["plain" if other == "tfwd" else "torch plain"]
            middle, low, high = ratio(times[other], base)
            results[name][other] = [round(r, 3) for r in (middle, low, high)]
            print(f"    {other:<12} {middle:8.2f}   ({low:.2f} to {high:.2f})")
        keras.backend.clear_session()
    results["growth"] = growth()
    print(f"growth with the batch, 8 to 1024: exponent {results['growth']['exponent']:.2f}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
