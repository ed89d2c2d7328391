"""A step with a mask for each example (DropConnect), compared with a naive batch of kernels.

    python benchmarks/per_example_masks.py [--cases mlp positions ...] [--seconds 30]

Each case is a chain of Dense layers on a batch. Its kernels are dropped in four ways:

- tfwd: `WeightDropout(..., per_example=True)`;
- naive: the kernel is tiled over the batch, `tf.nn.dropout` drops the copies, and a batched product
  multiplies each example with its own copy;
- one mask: `WeightDropout`, with one mask for the batch;
- plain: without dropout.

Time is the time of a training step with plain SGD. Memory is the peak of the process within a step,
above the plain step. It is a share of the bytes of one copy of all kernels for each example. For
the memory, each way runs in a separate process (see common/peak_memory.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from common import measure, memory_above_plain_step, peak_memory
from common.measure import Row

RATE = 0.5
TFWD, NAIVE, SHARED, PLAIN = WAYS = ("tfwd", "naive", "one mask", "plain")


class Case(NamedTuple):
    """A chain of Dense layers.

    Attributes:
        title: The case in words.
        widths: Number of features before the first layer, and after each layer.
        batch: Number of examples. A second number is the number of positions in each example.
        time: Goal for the ratio of the time to naive. Default None, for no goal.
        memory: Goal for the memory as a share of the copies. Default None, for no goal.
    """

    title: str
    widths: tuple[int, ...]
    batch: tuple[int, ...]
    time: float | None = None
    memory: float | None = None


CASES = {
    "mlp": Case("784-800-800-10, batch 128", (784, 800, 800, 10), (128,), 0.6, 0.2),
    "wide": Case("four layers of 1024, batch 64", (1024,) * 5, (64,), 0.6, 0.2),
    "positions": Case("two layers of 256, batch 32 x 64", (256,) * 3, (32, 64), 1.0, 1.0),
    "small": Case("64-64-10, batch 32", (64, 64, 10), (32,)),
}


def copies(case: Case) -> int:
    """Returns the bytes of a copy of all kernels for each example."""
    pairs = zip(case.widths, case.widths[1:], strict=False)
    return 4 * case.batch[0] * sum(before * after for before, after in pairs)


def step(case: Case, way: str) -> Callable[[], Any]:
    """Returns a training step."""
    measure.equal_threads()
    import keras
    import tensorflow as tf

    from tfwd import layers

    class Naive(keras.layers.Dense):
        """A Dense layer with a dropped copy of its kernel for each example."""

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            kernel = tf.convert_to_tensor(self.kernel)
            examples = tf.tile(kernel[tf.newaxis], [tf.shape(inputs)[0], 1, 1])
            dropped = tf.nn.dropout(examples, RATE)
            rows = inputs[:, tf.newaxis] if inputs.shape.rank == 2 else inputs
            outputs = tf.reshape(tf.matmul(rows, dropped), [*inputs.shape[:-1], self.units])
            return self.activation(outputs + tf.convert_to_tensor(self.bias))

    def layer(index: int, units: int) -> keras.Layer:
        activation = "relu" if index < len(case.widths) - 2 else "linear"
        dense = (Naive if way == NAIVE else keras.layers.Dense)(units, activation)
        if way in (TFWD, SHARED):
            return layers.WeightDropout(dense, RATE, seed=index, per_example=way == TFWD)
        return dense

    shape = (*case.batch, case.widths[0])
    model = keras.Sequential([layer(i, units) for i, units in enumerate(case.widths[1:])])
    model.build(shape)
    x = tf.random.stateless_normal(shape, [1, 2])
    sources = [weight.value for weight in model.trainable_variables]

    @tf.function
    def run() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        for variable, gradient in zip(sources, tape.gradient(loss, sources), strict=True):
            variable.assign_sub(1e-6 * gradient)
        return loss

    return lambda: run().numpy()


def by_time(name: str, seconds: float) -> list[Row]:
    """Measures the steps of a case, and returns a row for each comparison."""
    case = CASES[name]
    found = measure.alternate(
        {way: step(case, way) for way in WAYS}, seconds=seconds, title=case.title
    )
    claim = f"step with a mask per example, {case.title}"
    return [
        measure.time_over(claim, found, TFWD, NAIVE, at_most=case.time),
        measure.time_over(claim, found, TFWD, SHARED),
        measure.time_over(claim, found, TFWD, PLAIN),
    ]


def by_memory(names: list[str]) -> list[Row]:
    """Measures the memory of the cases, and returns a row for each case."""
    names = [name for name in names if CASES[name].memory is not None]
    ways = (TFWD, NAIVE, PLAIN)
    configurations = {f"{name}: {way}": (CASES[name], way) for name in names for way in ways}
    if not configurations:
        return []
    found = peak_memory.in_children(step, configurations, steps=3)
    rows = []
    for name in names:
        case, (ours, naive, plain) = CASES[name], (found[f"{name}: {way}"] for way in ways)
        figure = memory_above_plain_step.above(ours, plain, copies(case))
        if isinstance(figure, str):
            raise RuntimeError(f"{name}: {figure}")
        rows.append(
            Row(
                f"memory of a step with a mask per example, {case.title}",
                figure,
                "share of a kernel per example, over plain",
                figure.median,
                {
                    NAIVE: memory_above_plain_step.shown(
                        memory_above_plain_step.above(naive, plain, copies(case))
                    )
                },
                "",
                at_most=case.memory,
            )
        )
    return rows


def main() -> None:
    """Measures, and reports."""
    options = measure.parser(__doc__, seconds=15.0, of="the steps of a case")
    options.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    chosen = options.parse_args()
    rows = by_memory(chosen.cases)
    for name in chosen.cases:
        rows += by_time(name, chosen.seconds)
    measure.report("per_example_masks", rows, method=peak_memory.method_text())


if __name__ == "__main__":
    main()
