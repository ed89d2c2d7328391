"""Time of an optimizer's step with decoupled decay, on the 24 million weights of an AWD-LSTM.

    python benchmarks/decoupled_weight_decay_update_time.py

tfwd's side is `DecoupledWeightDecay` around Keras's SGD and Adam. The other sides are the same
optimizers without decay and with their own decay, PyTorch's AdamW (foreach) and Optax's adamw
(jitted, donated). Gradients are fixed, and each side has its own weights.

The gradient of an embedding of 10,000 words is sparse. It has 1,400 rows. Rows of frequent words
are repeated. One side sums the repeated rows. The other side does not sum them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from common import measure

if TYPE_CHECKING:
    import keras
    import numpy as np

# A tied embedding of 10,000 words, LSTMs of 1150, 1150 and 400 units, the decoder's bias.
SHAPES: list[tuple[int, ...]] = [
    (10_000, 400),
    *((400, 4600), (1150, 4600), (4600,)),
    *((1150, 4600), (1150, 4600), (4600,)),
    *((1150, 1600), (400, 1600), (1600,)),
    (10_000,),
]
RATE, DECAY = 1e-3, 1.2e-6
# For each group: our side, the other side, and the largest ratio of the two times.
RATIOS = {
    "SGD": [
        ("SGD, wrapped", "SGD alone", 1.25),
        ("SGD, wrapped", "SGD, its own decay", 1.05),
    ],
    "Adam": [
        ("Adam, wrapped", "Keras's AdamW", 1.05),
        ("Adam, wrapped", "Adam alone", None),
        ("Adam, wrapped", "PyTorch's AdamW", None),
        ("Adam, wrapped", "Optax's adamw", None),
    ],
    "Adam of rows": [("Adam, rows added up", "Adam of rows alone", 1.15)],
    "Adagrad of rows": [("Adagrad, rows added up", "Adagrad of rows alone", None)],
}
# An embedding, and the words of 20 texts of 70.
TABLE, WORDS = (10_000, 400), 1400


def arrays(seed: int) -> list[np.ndarray]:
    """Returns arrays of normal numbers in all the shapes, the same in each call."""
    import numpy as np

    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype("float32") for shape in SHAPES]


def keras_step(optimizer: keras.optimizers.Optimizer) -> Callable[[], None]:
    """Returns a step of an optimizer, in a `tf.function`, on variables of its own."""
    import keras
    import tensorflow as tf

    weights = [keras.Variable(value) for value in arrays(0)]
    gradients = [tf.constant(value) for value in arrays(1)]
    optimizer.build(weights)
    step = tf.function(lambda: optimizer.apply(gradients, weights), autograph=False)

    def run() -> None:
        step()
        weights[-1].numpy()

    return run


def sparse_step(optimizer: keras.optimizers.Optimizer) -> Callable[[], None]:
    """Returns a step on a sparse gradient of one table.

    The gradient is an argument, so that no constant is folded.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(2)
    table = keras.Variable(rng.normal(size=TABLE).astype("float32"))
    values = tf.constant(rng.normal(size=(WORDS, TABLE[1])).astype("float32"))
    words = tf.constant(rng.zipf(1.2, WORDS) % TABLE[0], tf.int32)
    optimizer.build([table])

    @tf.function(autograph=False)
    def step(words: tf.Tensor, values: tf.Tensor) -> None:
        optimizer.apply([tf.IndexedSlices(values, words, tf.constant(TABLE))], [table])

    def run() -> None:
        step(words, values)
        table.value[0].numpy()

    return run


def in_torch() -> Callable[[], Any]:
    """Returns a step of PyTorch's AdamW."""
    import torch

    torch.set_num_threads(measure.cores())
    weights = [torch.nn.Parameter(torch.tensor(value)) for value in arrays(0)]
    for weight, gradient in zip(weights, arrays(1), strict=True):
        weight.grad = torch.tensor(gradient)
    return torch.optim.AdamW(weights, lr=RATE, weight_decay=DECAY, foreach=True).step


def in_optax() -> Callable[[], None]:
    """Returns a step of Optax's adamw in one compiled function."""
    import jax
    import optax

    optimizer = optax.adamw(RATE, weight_decay=DECAY)
    weights = [jax.numpy.asarray(value) for value in arrays(0)]
    gradients = [jax.numpy.asarray(value) for value in arrays(1)]

    def update(weights: list[Any], state: Any) -> tuple[list[Any], Any]:
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    compiled = jax.jit(update, donate_argnums=(0, 1))
    held = [(weights, optimizer.init(weights))]

    def run() -> None:
        held[0] = jax.block_until_ready(compiled(*held[0]))

    return run


def candidates(inner: str) -> dict[str, Callable[[], Any]]:
    """Returns all installed sides of a group of `RATIOS`."""
    from keras import optimizers

    from tfwd.optimizers import DecoupledWeightDecay

    def wrapped(optimizer: keras.optimizers.Optimizer) -> DecoupledWeightDecay:
        return DecoupledWeightDecay(optimizer, DECAY, scale="learning_rate")

    if inner == "SGD":
        return {
            "SGD alone": keras_step(optimizers.SGD(RATE)),
            "SGD, its own decay": keras_step(optimizers.SGD(RATE, weight_decay=DECAY)),
            "SGD, wrapped": keras_step(wrapped(optimizers.SGD(RATE))),
        }
    if inner.endswith(" of rows"):
        kind = getattr(optimizers, inner.split()[0])
        return {
            f"{inner} alone": sparse_step(kind(RATE)),
            f"{inner.split()[0]}, rows added up": sparse_step(DecoupledWeightDecay(kind(RATE), 0)),
        }
    sides: dict[str, Any] = {
        "Adam alone": keras_step(optimizers.Adam(RATE)),
        "Keras's AdamW": keras_step(optimizers.AdamW(RATE, weight_decay=DECAY)),
        "Adam, wrapped": keras_step(wrapped(optimizers.Adam(RATE))),
        "PyTorch's AdamW": measure.attempt(in_torch, "PyTorch's AdamW"),
        "Optax's adamw": measure.attempt(in_optax, "Optax's adamw"),
    }
    return {name: run for name, run in sides.items() if run is not None}


def weights_label(inner: str) -> str:
    """Returns a text for the weights that a group's sides update."""
    return "an embedding of 4 M" if inner.endswith(" of rows") else "24 M weights"


def main() -> None:
    """Measures, and reports a row for each pair of sides."""
    options = measure.parser(__doc__, seconds=25.0, of="a group's rounds")
    options.add_argument("--groups", nargs="+", default=list(RATIOS), help="some of the groups")
    arguments = options.parse_args()
    seconds = arguments.seconds
    measure.equal_threads()
    rows, medians = [], {}
    for inner in arguments.groups:
        pairs = RATIOS[inner]
        found = measure.alternate(candidates(inner), seconds=seconds, warmup=3, title=inner)
        medians |= measure.milliseconds(found)
        rows += [
            measure.time_over(
                f"step of an optimizer over {weights_label(inner)}: {ours}, against {other}",
                found,
                ours,
                other,
                at_most=limit,
            )
            for ours, other, limit in pairs
            if other in found
        ]
        gc.collect()
    measure.report("decoupled_weight_decay_update_time", rows, milliseconds=medians)


if __name__ == "__main__":
    main()
