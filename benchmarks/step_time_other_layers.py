"""Time of a step with weight dropout, over the naive step, for each kind of layer other than Dense.

    python benchmarks/step_time_other_layers.py [--kinds conv gru ...]

The script does the same as step_time_dense.py, for the layers of step_memory_other_layers.py. A
layer without a rule runs again in backward, so its time has no goal.
"""

from __future__ import annotations

from common import measure
from common.measure import Row, ratio

LIMITS = {
    "conv": 0.9,
    "einsum": 0.9,
    "embedding": 0.9,
    "attention": 0.9,
    "gru": None,
    "user": None,
}


def main() -> None:
    """Measures, and reports a row for each kind."""
    options = measure.parser(__doc__, seconds=3.5, of="a kind's rounds")
    options.add_argument("--kinds", nargs="+", choices=LIMITS, default=list(LIMITS))
    chosen = options.parse_args()
    measure.equal_threads()
    from common import layer_stacks

    rows = []
    for kind in chosen.kinds:
        ways = ("bare", "dropout", "naive dropout", "recompute_grad dropout")
        steps = {way: layer_stacks.train_step(kind, way) for way in ways}
        found = measure.alternate(steps, seconds=chosen.seconds, least=4, warmup=1, title=kind)
        medians = measure.milliseconds(found)
        rows.append(
            Row(
                f"time of a step with dropout, {layer_stacks.KINDS[kind].title}",
                ratio(found["dropout"], found["naive dropout"]),
                "time over naive",
                float(medians["dropout"]),
                {
                    "naive": medians["naive dropout"],
                    "without": medians["bare"],
                    "recompute_grad": medians["recompute_grad dropout"],
                },
                at_most=LIMITS[kind],
            )
        )
    measure.report("step_time_other_layers", rows)


if __name__ == "__main__":
    main()
