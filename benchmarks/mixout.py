"""A fine-tuning step, and with Mixout on all kernels over the plain one: tfwd and PyTorch.

    python benchmarks/mixout.py

Time is that of a whole step with Adam, of BERT in MiniLM's shape (6 layers of 384) at 32 texts of
64 places. PyTorch's way is that of Mixout's authors: each linear layer mixes its weight in each
call, and keeps the mask until backward. The plain step is over PyTorch's and keras-hub's too.

Memory is what the process holds at most within a step, over the plain one, in copies of the mixed
weights, of BERT-base's shape (12 layers of 768) at 8 texts of 64 places; a process for each side
(see peak.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import measure
import memory
import peak
from measure import Row

PLAIN, MIXOUT, DROPOUT = "plain", "Mixout", "weight dropout"
WAYS = (PLAIN, MIXOUT, DROPOUT)
RATE = 0.7
VOCABULARY, LONGEST = 30522, 512
# Layers, width, heads, between; and texts of so many places.
SMALL = (6, 384, 12, 1536), (32, 64)
LARGE = (12, 768, 12, 3072), (8, 64)
TIME, MEMORY = 1.15, 1.05


def mixed_bytes(shape: tuple[int, int, int, int]) -> int:
    """Of the kernels: four of attention and two beside it, in each layer."""
    layers, width, _, wide = shape
    return layers * (4 * width * width + 2 * width * wide) * 4


def _step(call: Callable[[], Any], weights: list[Any]) -> Callable[[], Any]:
    """A step with Keras's Adam; the loss is the mean square of what comes out."""
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


def ours(way: str, shape: tuple[int, int, int, int], texts: tuple[int, int]) -> Callable[[], Any]:
    """A step of tfwd's BERT."""
    import tensorflow as tf
    import transformer_step

    from tfwd import layers
    from tfwd import parametrizations as P
    from tfwd.layers import transformer

    ids, mask = map(tf.constant, transformer_step.data(texts))
    count, width, heads, wide = shape
    bert = transformer.Bert(
        VOCABULARY, width, count, heads, wide, LONGEST, dropout=0.0, attention_dropout=0.0
    )
    bert(ids)
    ways = {MIXOUT: P.Mixout(RATE), DROPOUT: P.Dropout(RATE)}
    model = bert
    if way != PLAIN:
        model = layers.Parametrized(bert, {"stack/.*/kernel": ways[way]}, seed=1)
        assert len(model.effective_weights(0)) == 6 * count
    return _step(lambda: model(ids, mask=mask, training=True), bert.trainable_variables)


def hub(way: str, shape: tuple[int, int, int, int], texts: tuple[int, int]) -> Callable[[], Any]:
    """A step of keras-hub's BERT, plain."""
    import keras_hub
    import tensorflow as tf
    import transformer_step

    assert way == PLAIN
    ids, mask = map(tf.constant, transformer_step.data(texts))
    count, width, heads, wide = shape
    model = keras_hub.models.BertBackbone(
        VOCABULARY, count, heads, width, wide, dropout=0.0, max_sequence_length=LONGEST
    )
    given = {"token_ids": ids, "padding_mask": mask, "segment_ids": tf.zeros_like(ids)}
    return _step(lambda: model(given, training=True)["sequence_output"], model.trainable_variables)


def torch(way: str, shape: tuple[int, int, int, int], texts: tuple[int, int]) -> Callable[[], Any]:
    """A step of Hugging Face's BERT, whose linear layers mix at each call."""
    import torch
    import transformer_step
    import transformers

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

    measure.equal_threads()
    count, width, heads, wide = shape
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=count,
        num_attention_heads=heads,
        intermediate_size=wide,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertModel(config, add_pooling_layer=False)
    ids, mask = (torch.from_numpy(array.astype("int64")) for array in transformer_step.data(texts))
    if way != PLAIN:
        mixed = 0
        for module in list(model.encoder.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(module, name, MixLinear(child))
                    mixed += 1
        assert mixed == 6 * count
    optimizer = torch.optim.Adam(model.parameters(), 1e-5)
    model.train()

    def step() -> float:
        loss = model(ids, attention_mask=mask).last_hidden_state.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


SIDES = {"tfwd": ours, "PyTorch": torch}


def held(side: str, way: str) -> Callable[[], list[int]]:
    """What the process holds at most in each of three steps, bytes; made in the child."""
    measure.equal_threads()
    step = SIDES[side](way, *LARGE)

    def most() -> list[int]:
        step()
        return [peak.resident() + above for above in peak.peaks(step, steps=3, warmup=1)]

    return most


def by_memory(sides: list[str]) -> list[Row]:
    """A row for each side and way."""
    found = peak.in_children(
        held,
        {f"{side}, {way}": (side, way) for side in sides for way in WAYS[:2]},
        steps=None,
        at_once=1,
    )
    size = mixed_bytes(LARGE[0])
    above = {s: memory.above(found[f"{s}, {MIXOUT}"], found[f"{s}, {PLAIN}"], size) for s in sides}
    figure = above["tfwd"]
    if isinstance(figure, str):
        raise RuntimeError(f"tfwd: {figure}")
    return [
        Row(
            "memory of a step with Mixout on all kernels, BERT-base, 8 x 64",
            figure,
            "copies of the mixed weights, over plain",
            figure.median,
            {side: memory.shown(above[side]) for side in sides if side != "tfwd"},
            "copies",
            at_most=MEMORY,
        )
    ]


def by_time(sides: list[str], seconds: float) -> list[Row]:
    """A row for each side and way, and the plain step over those of the others."""
    made: dict[str, Any] = {
        f"{side}, {way}": SIDES[side](way, *SMALL) for side in sides for way in WAYS
    }
    theirs = measure.attempt(lambda: hub(PLAIN, *SMALL), "keras-hub")
    if theirs:
        made[f"keras-hub, {PLAIN}"] = theirs
    found = measure.alternate(made, seconds=seconds, title="MiniLM's shape, 32 x 64")
    medians = measure.milliseconds(found)

    def row(name: str, one: str, other: str, limit: float | None) -> Row:
        return Row(
            f"{name}, MiniLM's shape, 32 x 64",
            measure.ratio(found[one], found[other]),
            f"time over {other}",
            float(medians[one]),
            {other: medians[other]},
            at_most=limit,
        )

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
    options = measure.parser(__doc__)
    options.add_argument("--seconds", type=float, default=40.0, help="for the steps")
    seconds = options.parse_args().seconds
    measure.equal_threads()
    torch_is_here = measure.attempt(lambda: __import__("transformers") and __import__("torch"), "")
    sides = ["tfwd", *(["PyTorch"] if torch_is_here else [])]
    rows = by_memory(sides) + by_time(sides, seconds)
    measure.report("mixout", rows, method=peak.method())


if __name__ == "__main__":
    main()
