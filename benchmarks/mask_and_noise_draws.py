"""Time to draw and apply a mask or noise, per entry of the weight.

    python benchmarks/mask_and_noise_draws.py

Each side takes a weight and returns the effective weight, as inside a training step. The sides are
`tfwd.parametrizations`, TensorFlow's stateless operations, and PyTorch's operations, which are not
functions of a seed. `copy` computes `weight + weight`, which is the smallest possible work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import measure
from common.measure import Row, ratio

SHAPES = {
    "recurrent kernel of an LSTM of 1150": (1150, 4600),
    "Dense 3072x3072": (3072, 3072),
    "recurrent kernel of an LSTM of 200": (200, 800),
}
RATE, STDDEV = 0.5, 0.01
# With fewer entries, the fixed cost of a call is larger than the cost of the draw, on each side.
LARGE = 1_000_000


def tensorflow(shape: tuple[int, int]) -> dict[str, Callable[[], Any]]:
    """Returns the calls of tfwd, of TensorFlow's own operations, and of a copy."""
    import tensorflow as tf

    from tfwd import parametrizations as P

    weight = tf.Variable(tf.random.stateless_normal(shape, [1, 2]))
    seed = tf.Variable([1, 2])

    def timed(function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Callable[[], Any]:
        @tf.function
        def run() -> tf.Tensor:
            seed.assign_add([0, 1])
            return function(weight.read_value(), seed.read_value())

        return run

    dropout, noise = P.Dropout(RATE), P.GaussianNoise(STDDEV)
    return {
        "dropout": timed(lambda w, s: dropout(w, s)),
        "stateless_dropout": timed(lambda w, s: tf.nn.experimental.stateless_dropout(w, RATE, s)),
        "noise": timed(lambda w, s: noise(w, s)),
        "stateless_normal": timed(lambda w, s: w + STDDEV * tf.random.stateless_normal(w.shape, s)),
        "copy": timed(lambda w, _: w + w),
    }


def pytorch(shape: tuple[int, int]) -> dict[str, Callable[[], Any]]:
    """Returns the calls of PyTorch."""
    import torch

    torch.set_num_threads(measure.cores())
    weight = torch.randn(shape)
    return {
        "F.dropout": lambda: torch.nn.functional.dropout(weight, RATE),
        "randn_like": lambda: weight + STDDEV * torch.randn_like(weight),
    }


def main() -> None:
    """Measures, and reports two rows for each shape."""
    seconds = measure.parser(__doc__, seconds=12.0, of="a shape's rounds").parse_args().seconds
    has_torch = measure.module("torch", "PyTorch")
    measure.equal_threads()
    rows = []
    for name, shape in SHAPES.items():
        entries = shape[0] * shape[1]
        candidates = tensorflow(shape) | (pytorch(shape) if has_torch else {})
        calls = max(1, 5_000_000 // entries)
        found = measure.alternate(
            candidates, seconds=seconds, calls=calls, least=10, title=f"draws {shape}"
        )
        cost = {side: 1e6 * float(v) / entries for side, v in measure.milliseconds(found).items()}
        for way, peer, other, limit in (
            ("dropout", "stateless_dropout", "F.dropout", 7),
            ("noise", "stateless_normal", "randn_like", 3),
        ):
            peers = {peer: cost[peer], other: cost.get(other, "not installed")}
            rows.append(
                Row(
                    f"drawing and applying {way}, {name}",
                    ratio(found[peer], found[way]),
                    f"times faster than {peer}",
                    cost[way],
                    {**peers, "copy": cost["copy"]},
                    "ns per entry",
                    at_least=limit if entries > LARGE else None,
                )
            )
    measure.report("mask_and_noise_draws", rows)


if __name__ == "__main__":
    main()
