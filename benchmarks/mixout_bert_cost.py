"""A fine-tuning step of BERT with Mixout on all kernels, and the plain step: tfwd and PyTorch.

    python benchmarks/mixout_bert_cost.py

Time is the time of a full step with Adam. The model is BERT in MiniLM's shape (6 layers of 384),
with 32 texts of 64 positions. PyTorch's side uses the code of Mixout's authors: each linear layer
mixes its weight in each call, and stores the mask until backward. tfwd's plain step is also
compared with the plain steps of PyTorch and keras-hub.

Memory is the peak of the process within a step, above the plain step, in copies of the mixed
weights. The model has BERT-base's shape (12 layers of 768), with 8 texts of 64 positions. Each side
runs in a separate process (see common/peak_memory.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import bert, measure, memory_above_plain_step, peak_memory
from common.measure import Row

PLAIN, MIXOUT, DROPOUT = "plain", "Mixout", "weight dropout"
WAYS = (PLAIN, MIXOUT, DROPOUT)
RATE = 0.7
# Sizes of the model, and number of texts with their positions.
SMALL = bert.MINI_LM, (32, 64)
LARGE = bert.BASE, (8, 64)
TIME, MEMORY = 1.15, 1.05


def mixed_bytes(sizes: bert.Sizes) -> int:
    """Returns the bytes of the kernels: four of attention and two of Dense layers, per layer."""
    return sizes.layers * (4 * sizes.width * sizes.width + 2 * sizes.width * sizes.wide) * 4


def _step(call: Callable[[], Any], weights: list[Any]) -> Callable[[], Any]:
    """Returns a step with Keras's Adam. The loss is the mean square of the outputs."""
    import keras
    import tensorflow as tf

    optimizer = keras.optimizers.Adam(1e-5)
    optimizer.build(weights)
    sources = [weight.value for weight in weights]

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(call()))
        optimizer.apply(tape.gradient(loss, sources), weights)
        return loss

    return lambda: step().numpy()


def ours(way: str, sizes: bert.Sizes, texts: tuple[int, int]) -> Callable[[], Any]:
    """Returns a step of tfwd's BERT."""
    from tfwd import layers
    from tfwd import parametrizations as P

    plain, call = bert.ours(sizes, texts)
    ways = {MIXOUT: P.Mixout(RATE), DROPOUT: P.Dropout(RATE)}
    model = plain
    if way != PLAIN:
        model = layers.Parametrized(plain, {"stack/.*/kernel": ways[way]}, seed=1)
        assert len(model.effective_weights(0)) == 6 * sizes.layers
    return _step(lambda: call(True, model), plain.trainable_variables)


def hub(sizes: bert.Sizes, texts: tuple[int, int]) -> Callable[[], Any]:
    """Returns a plain step of keras-hub's BERT."""
    from peers import bert as peers

    model, call = peers.keras_hub(sizes, texts)
    return _step(lambda: call(True), model.trainable_variables)


def torch(way: str, sizes: bert.Sizes, texts: tuple[int, int]) -> Callable[[], Any]:
    """Returns a step of Hugging Face's BERT, with linear layers that mix at each call."""
    import torch
    from peers import bert as peers

    class Mixed(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, weight: Any, target: Any) -> Any:
            context.dropped = torch.empty_like(weight).bernoulli_(RATE)
            result = weight + context.dropped * (target - weight)
            return result.sub_(target, alpha=RATE).div_(1 - RATE)

        @staticmethod
        def backward(context: Any, upstream: Any) -> Any:
            return upstream * (1 - context.dropped) / (1 - RATE), None

    class MixLinear(torch.nn.Module):
        def __init__(self, linear: Any):
            super().__init__()
            self.weight, self.bias = linear.weight, linear.bias
            target = torch.zeros_like(self.weight)
            if way == MIXOUT:
                target = self.weight.detach().clone()
            self.register_buffer("target", target)

        def forward(self, x: Any) -> Any:
            return torch.nn.functional.linear(x, Mixed.apply(self.weight, self.target), self.bias)

    model, call = peers.hugging_face(sizes, texts)
    if way != PLAIN:
        mixed = 0
        for module in list(model.encoder.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(module, name, MixLinear(child))
                    mixed += 1
        assert mixed == 6 * sizes.layers
    optimizer = torch.optim.Adam(model.parameters(), 1e-5)
    model.train()

    def step() -> float:
        loss = call().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


SIDES = {"tfwd": ours, "PyTorch": torch}


def peak_measurement(side: str, way: str) -> Callable[[], list[int]]:
    """Returns a function that measures the peaks of three steps in bytes, in a child process."""
    measure.equal_threads()
    step = SIDES[side](way, *LARGE)

    def measure_peaks() -> list[int]:
        step()
        return [
            peak_memory.resident() + above for above in peak_memory.peaks(step, steps=3, warmup=1)
        ]

    return measure_peaks


def by_memory(sides: list[str]) -> list[Row]:
    """Measures the memory of each side with and without Mixout, and returns the row."""
    found = peak_memory.in_children(
        peak_measurement,
        {f"{side}, {way}": (side, way) for side in sides for way in WAYS[:2]},
        steps=None,
        at_once=1,
    )
    size = mixed_bytes(LARGE[0])
    above = {
        s: memory_above_plain_step.above(found[f"{s}, {MIXOUT}"], found[f"{s}, {PLAIN}"], size)
        for s in sides
    }
    figure = above["tfwd"]
    if isinstance(figure, str):
        raise RuntimeError(f"tfwd: {figure}")
    return [
        Row(
            "memory of a step with Mixout on all kernels, BERT-base, 8 x 64",
            figure,
            "copies of the mixed weights, over plain",
            figure.median,
            {side: memory_above_plain_step.shown(above[side]) for side in sides if side != "tfwd"},
            "copies",
            at_most=MEMORY,
        )
    ]


def by_time(sides: list[str], seconds: float) -> list[Row]:
    """Measures all steps, and returns a row for each comparison."""
    made: dict[str, Any] = {
        f"{side}, {way}": SIDES[side](way, *SMALL) for side in sides for way in WAYS
    }
    theirs = measure.attempt(lambda: hub(*SMALL), "keras-hub")
    if theirs:
        made[f"keras-hub, {PLAIN}"] = theirs
    found = measure.alternate(made, seconds=seconds, title="MiniLM's shape, 32 x 64")

    def row(name: str, one: str, other: str, limit: float | None) -> Row:
        claim = f"{name}, MiniLM's shape, 32 x 64"
        return measure.time_over(claim, found, one, other, at_most=limit)

    rows = [
        row(
            f"step with {way} on all kernels, {side}",
            f"{side}, {way}",
            f"{side}, {PLAIN}",
            TIME if (side, way) == ("tfwd", MIXOUT) else None,
        )
        for side in sides
        for way in WAYS
        if way != PLAIN
    ]
    mine = f"tfwd, {PLAIN}"
    for other, limit in ((f"PyTorch, {PLAIN}", 1.0), (f"keras-hub, {PLAIN}", 1 / 1.2)):
        if other in found:
            rows.append(row("plain step", mine, other, limit))
    return rows


def main() -> None:
    """Measures, and reports."""
    seconds = measure.parser(__doc__, seconds=40.0, of="the steps").parse_args().seconds
    measure.equal_threads()
    has_torch = measure.module("transformers", "PyTorch") and measure.module("torch", "PyTorch")
    sides = ["tfwd", *(["PyTorch"] if has_torch else [])]
    rows = by_memory(sides) + by_time(sides, seconds)
    measure.report("mixout_bert_cost", rows, method=peak_memory.method_text())


if __name__ == "__main__":
    main()
