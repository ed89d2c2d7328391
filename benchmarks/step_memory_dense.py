"""Peak memory of a step of Dense layers with weight dropout or noise, above the step without it.

    python benchmarks/step_memory_dense.py

The model has twelve Dense layers of 3072 x 3072 with relu, batch 64, SGD. Each configuration is
measured in a separate process (see common/peak_memory.py). The figure is a share of the bytes of
all parametrized weights: 1.00 is a second copy of the model.
"""

from __future__ import annotations

from common import measure, memory_above_plain_step, peak_memory
from common.measure import Spread

KIND = "dense"
OURS = {"dropout": 0.12, "noise": 0.15, "both": 0.15}
BYTES = 12 * 3072 * 3072 * 4


def main() -> None:
    """Measures, and reports a row for each way."""
    options = measure.parser(__doc__)
    options.add_argument("--steps", type=int, default=3, help="steps measured in each process")
    steps = options.parse_args().steps
    tf_ways = ["bare", *OURS, "fit", *(f"naive {way}" for way in OURS), "recompute_grad dropout"]
    torch_ways = {f"PyTorch {way}": (way,) for way in ("bare", *OURS, "checkpoint dropout")}
    found = peak_memory.in_children(
        memory_above_plain_step.layer_stack_step, {way: (KIND, way) for way in tf_ways}, steps=steps
    )
    found |= peak_memory.in_children(memory_above_plain_step.torch_step, torch_ways, steps=1)
    share = {
        way: memory_above_plain_step.above(
            peaks, found["PyTorch bare" if "PyTorch" in way else "bare"], BYTES
        )
        for way, peaks in found.items()
    }
    rows = []
    for way, limit in OURS.items():
        peers = {"naive": memory_above_plain_step.shown(share[f"naive {way}"])}
        if way == "dropout":
            peers["recompute_grad"] = memory_above_plain_step.shown(share["recompute_grad dropout"])
        peers["PyTorch"] = memory_above_plain_step.shown(share[f"PyTorch {way}"])
        if way == "dropout":
            peers["PyTorch checkpoint"] = memory_above_plain_step.shown(
                share["PyTorch checkpoint dropout"]
            )
        names = [(way, f"{way}, 12 Dense 3072x3072")]
        if way == "dropout":
            names.append(("fit", f"{way}, 12 Dense 3072x3072, by model.fit"))
        for ours, title in names:
            rows += memory_above_plain_step.rows(ours, title, share[ours], peers, limit)
    if not rows:
        raise RuntimeError(
            "no configuration could be measured: see the errors of the child processes above"
        )
    levels = {way: memory_above_plain_step.shown(_of_all(peaks)) for way, peaks in found.items()}
    measure.report("step_memory_dense", rows, method=peak_memory.method_text(), peak_share=levels)


def _of_all(peaks: list[int] | str) -> Spread | str:
    """Returns peaks as shares of the weights, without subtracting the peak of another side."""
    return peaks if isinstance(peaks, str) else Spread.of([value / BYTES for value in peaks])


if __name__ == "__main__":
    main()
