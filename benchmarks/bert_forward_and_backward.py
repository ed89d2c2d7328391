"""Time of BERT's forward pass, alone and with backward: tfwd, PyTorch and keras-hub.

    python benchmarks/bert_forward_and_backward.py

The model is BERT in MiniLM's shape: 6 layers of 384, 12 heads, intermediate size 1536. Weights are
random. There is no dropout, except in one case with the usual rate of 0.1. A fifth of the positions
is padding. tfwd and keras-hub run in a `tf.function`, with and without XLA. Hugging Face's
`BertModel` runs with its default settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import bert, measure
from common.measure import Row
from peers import bert as peers

OURS, TORCH, HUB = "tfwd", "PyTorch", "keras-hub"
SHAPES = ((32, 64), (8, 256))
FORWARD, BOTH = "forward", "forward and backward"
OVER_TORCH, OVER_HUB = 1.0, 1 / 1.2  # largest ratios of the times


def in_tensorflow(
    make: Callable[..., tuple[Any, Callable[[bool], Any]]],
    shape: tuple[int, int],
    passes: str,
    dropout: float,
    compiled: bool = False,
) -> Callable[[], Any]:
    """Returns a pass of a Keras model. The loss is the mean square of the outputs.

    Args:
        make: `bert.ours` or `peers.keras_hub`.
        shape: Number of texts, and number of positions in each text.
        passes: `FORWARD` or `BOTH`.
        dropout: Rate of dropout.
        compiled: `jit_compile` of the function.
    """
    import tensorflow as tf

    model, call = make(bert.MINI_LM, shape, dropout)
    if passes == FORWARD:
        run = tf.function(lambda: call(False), jit_compile=compiled)
        return lambda: run().numpy()
    weights = [weight.value for weight in model.trainable_variables]

    @tf.function(jit_compile=compiled)
    def both() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(call(True)))
        return loss, tape.gradient(loss, weights)

    return lambda: both()[0].numpy()


def in_torch(shape: tuple[int, int], passes: str, dropout: float) -> Callable[[], Any]:
    """Returns a pass of Hugging Face's model. The arguments are as in `in_tensorflow`."""
    import torch

    model, call = peers.hugging_face(bert.MINI_LM, shape, dropout)

    def forward() -> float:
        with torch.no_grad():
            return call().sum().item()

    def both() -> float:
        loss = call().square().mean()
        loss.backward()
        model.zero_grad()
        return loss.item()

    model.train(passes == BOTH)
    return forward if passes == FORWARD else both


def rows_of(shape: tuple[int, int], passes: str, dropout: float, seconds: float) -> list[Row]:
    """Measures one shape and pass, and returns its rows."""
    case = (shape, passes, dropout)
    sides = {
        OURS: lambda: in_tensorflow(bert.ours, *case),
        f"{OURS}, XLA": lambda: in_tensorflow(bert.ours, *case, compiled=True),
        TORCH: lambda: in_torch(*case),
        HUB: lambda: in_tensorflow(peers.keras_hub, *case),
        f"{HUB}, XLA": lambda: in_tensorflow(peers.keras_hub, *case, compiled=True),
    }
    made = {name: measure.attempt(make, name) for name, make in sides.items()}
    heading = f"{passes}, {shape[0]} x {shape[1]}" + (f", dropout {dropout}" if dropout else "")
    found = measure.alternate(
        {name: call for name, call in made.items() if call is not None},
        seconds=seconds,
        title=heading,
    )
    pairs = [
        (OURS, TORCH, OVER_TORCH),
        (OURS, HUB, OVER_HUB),
        (f"{OURS}, XLA", TORCH, None),
        (f"{OURS}, XLA", f"{HUB}, XLA", OVER_HUB),
    ]
    return [
        measure.time_over(f"{heading}: {mine} over {other}", found, mine, other, at_most=limit)
        for mine, other, limit in pairs
        if other in found
    ]


def main() -> None:
    """Measures, and reports."""
    options = measure.parser(__doc__, seconds=9.0, of="each shape and pass")
    seconds = options.parse_args().seconds
    measure.equal_threads()
    cases = [(shape, passes, 0.0) for shape in SHAPES for passes in (FORWARD, BOTH)]
    cases.append((SHAPES[0], BOTH, 0.1))
    rows = []
    for case in cases:
        rows += rows_of(*case, seconds)
    measure.report("bert_forward_and_backward", rows)


if __name__ == "__main__":
    main()
