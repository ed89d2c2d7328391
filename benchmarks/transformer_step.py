"""A transformer's forward pass, and with the backward pass: tfwd, PyTorch and keras-hub.

    python benchmarks/transformer_step.py

The model is BERT in MiniLM's shape: 6 layers of 384, 12 heads, 1536 between; random weights, no
dropout, and once with the usual rate of 0.1. A fifth of the places is padding. tfwd and keras-hub
run in a `tf.function`, with XLA too; Hugging Face's `BertModel` runs as it does by default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import measure
import numpy as np
from measure import Row

OURS, TORCH, HUB = "tfwd", "PyTorch", "keras-hub"
VOCABULARY, LAYERS, WIDTH, HEADS, WIDE, LONGEST = 30522, 6, 384, 12, 1536, 512
SHAPES = ((32, 64), (8, 256))
FORWARD, BOTH = "forward", "forward and backward"
OVER_TORCH, OVER_HUB = 1.0, 1 / 1.2  # of the time


def data(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, of which the last are padding, and where there is text."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, VOCABULARY, shape).astype("int32")
    lengths = rng.integers(shape[1] * 3 // 5, shape[1] + 1, shape[0])
    mask = np.arange(shape[1]) < lengths[:, None]
    return ids * mask, mask.astype("int32")


def _tensorflow(
    model: Any, call: Callable[[bool], Any], passes: str, compiled: bool
) -> Callable[[], Any]:
    """A pass of a Keras model; the loss is the mean square of what comes out."""
    import tensorflow as tf

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


def ours(
    shape: tuple[int, int], passes: str, dropout: float, compiled: bool = False
) -> Callable[[], Any]:
    """Makes the step with tfwd's layers."""
    import tensorflow as tf

    from tfwd.layers import transformer

    ids, mask = map(tf.constant, data(shape))
    model = transformer.Bert(
        VOCABULARY,
        WIDTH,
        LAYERS,
        HEADS,
        WIDE,
        max_length=LONGEST,
        dropout=dropout,
        attention_dropout=dropout,
    )
    model(ids)
    return _tensorflow(model, lambda t: model(ids, mask=mask, training=t), passes, compiled)


def hub(
    shape: tuple[int, int], passes: str, dropout: float, compiled: bool = False
) -> Callable[[], Any]:
    """keras-hub's backbone."""
    import keras_hub
    import tensorflow as tf

    ids, mask = map(tf.constant, data(shape))
    model = keras_hub.models.BertBackbone(
        VOCABULARY, LAYERS, HEADS, WIDTH, WIDE, dropout=dropout, max_sequence_length=LONGEST
    )
    given = {"token_ids": ids, "padding_mask": mask, "segment_ids": tf.zeros_like(ids)}
    return _tensorflow(
        model, lambda t: model(given, training=t)["sequence_output"], passes, compiled
    )


def torch(shape: tuple[int, int], passes: str, dropout: float) -> Callable[[], Any]:
    """Hugging Face's model."""
    import torch
    import transformers

    measure.equal_threads()
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=WIDE,
        max_position_embeddings=LONGEST,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = transformers.BertModel(config, add_pooling_layer=False)
    ids, mask = (torch.from_numpy(array.astype("int64")) for array in data(shape))

    def forward() -> float:
        with torch.no_grad():
            return model(ids, attention_mask=mask).last_hidden_state.sum().item()

    def both() -> float:
        loss = model(ids, attention_mask=mask).last_hidden_state.square().mean()
        loss.backward()
        model.zero_grad()
        return loss.item()

    model.train(passes == BOTH)
    return forward if passes == FORWARD else both


def rows_of(shape: tuple[int, int], passes: str, dropout: float, seconds: float) -> list[Row]:
    """The rows of one shape and pass."""
    sides = {
        OURS: lambda: ours(shape, passes, dropout),
        f"{OURS}, XLA": lambda: ours(shape, passes, dropout, compiled=True),
        TORCH: lambda: torch(shape, passes, dropout),
        HUB: lambda: hub(shape, passes, dropout),
        f"{HUB}, XLA": lambda: hub(shape, passes, dropout, compiled=True),
    }
    made = {name: measure.attempt(make, name) for name, make in sides.items()}
    heading = f"{passes}, {shape[0]} x {shape[1]}" + (f", dropout {dropout}" if dropout else "")
    found = measure.alternate(
        {name: call for name, call in made.items() if call is not None},
        seconds=seconds,
        title=heading,
    )
    medians = measure.milliseconds(found)
    pairs = [
        (OURS, TORCH, OVER_TORCH),
        (OURS, HUB, OVER_HUB),
        (f"{OURS}, XLA", TORCH, None),
        (f"{OURS}, XLA", f"{HUB}, XLA", OVER_HUB),
    ]
    return [
        Row(
            f"{heading}: {mine} over {other}",
            measure.ratio(found[mine], found[other]),
            f"time over {other}",
            float(medians[mine]),
            {other: medians[other]},
            at_most=limit,
        )
        for mine, other, limit in pairs
        if other in found
    ]


def main() -> None:
    """Measures, and reports."""
    options = measure.parser(__doc__)
    options.add_argument("--seconds", type=float, default=9.0, help="for each shape and pass")
    seconds = options.parse_args().seconds
    measure.equal_threads()
    cases = [(shape, passes, 0.0) for shape in SHAPES for passes in (FORWARD, BOTH)]
    cases.append((SHAPES[0], BOTH, 0.1))
    rows = []
    for case in cases:
        rows += rows_of(*case, seconds)
    measure.report("transformer_step", rows)


if __name__ == "__main__":
    main()
