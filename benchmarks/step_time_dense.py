"""Time of a step of Dense layers with weight dropout or noise, divided by the time of a naive step.

    python benchmarks/step_time_dense.py

The step is the step of step_memory_dense.py: twelve Dense layers of 3072 x 3072 with relu. The
naive step applies TensorFlow's `tf.nn.experimental.stateless_dropout` or
`tf.random.stateless_normal` to the weight in a custom layer. It stores the masks and the effective
weights for backward.
"""

from __future__ import annotations

from common import measure
from common.measure import Row, ratio

LIMITS = {"dropout": 0.70, "noise": 0.75}
KIND = "dense"


def main() -> None:
    """Measures, and reports a row for each way."""
    seconds = measure.parser(__doc__, seconds=40.0).parse_args().seconds
    torch_layer_stacks = measure.module("peers.torch_layer_stacks", "PyTorch")
    measure.equal_threads()
    from common import layer_stacks

    ways = ["bare", *LIMITS, *(f"naive {way}" for way in LIMITS), "recompute_grad dropout"]
    steps = {way: layer_stacks.train_step(KIND, way) for way in ways}
    if torch_layer_stacks:
        steps["PyTorch dropout"] = torch_layer_stacks.train_step("dropout")
    found = measure.alternate(steps, seconds=seconds, least=4, warmup=1, title="step time")
    medians = measure.milliseconds(found)
    rows = []
    for way, limit in LIMITS.items():
        peers = {"naive": medians[f"naive {way}"], "without": medians["bare"]}
        if way == "dropout":
            peers["recompute_grad"] = medians["recompute_grad dropout"]
            peers["PyTorch"] = medians.get("PyTorch dropout", "not installed")
        rows.append(
            Row(
                f"time of a step with {way}, 12 Dense 3072x3072",
                ratio(found[way], found[f"naive {way}"]),
                "time over naive",
                float(medians[way]),
                peers,
                at_most=limit,
            )
        )
    over_bare = {way: ratio(times, found["bare"])._asdict() for way, times in found.items()}
    measure.report("step_time_dense", rows, milliseconds=medians, over_bare=over_bare)


if __name__ == "__main__":
    main()
