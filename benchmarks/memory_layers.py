"""Peak memory of a training step with weight dropout, kind of layer by kind of layer.

    python benchmarks/memory_layers.py [--kinds conv gru ...]

As memory.py, for convolutions, einsums, embeddings and attention, and for layers that no rule is
for: a GRU and a layer that a user wrote.
"""

from __future__ import annotations

import measure
import memory
import peak
from measure import Row

LIMITS = {
    "conv": 0.2,
    "einsum": 0.2,
    "embedding": 0.2,
    "attention": 0.2,
    "gru": 0.25,
    "user": 0.25,
}
# Bytes of the perturbed weights: of each layer, times the layers.
SIZES = {
    "conv": 8 * 9 * 512 * 512 * 4,
    "einsum": 8 * 2048 * 2048 * 4,
    "embedding": 200_000 * 256 * 4,
    "attention": 6 * 4 * 1024 * 1024 * 4,
    "gru": 4 * 1024 * 3 * 1024 * 4,
    "user": 6 * 2 * 2048 * 2048 * 4,
}
WAYS = ("bare", "dropout", "naive dropout")


def main() -> None:
    """Measures, and reports a row a kind."""
    options = measure.parser(__doc__)
    options.add_argument("--steps", type=int, default=3, help="steps measured in each process")
    options.add_argument("--kinds", nargs="+", choices=LIMITS, default=list(LIMITS))
    chosen = options.parse_args()
    configurations = {f"{kind}: {way}": (kind, way) for kind in chosen.kinds for way in WAYS}
    found = peak.in_children(memory.tensorflow, configurations, steps=chosen.steps)
    import workloads

    rows = []
    for kind in chosen.kinds:
        bare, ours, naive = (found[f"{kind}: {way}"] for way in WAYS)
        figure = memory.above(ours, bare, SIZES[kind])
        if isinstance(figure, str):
            measure.CONSOLE.print(f"without {kind}: {figure}", style="red")
            continue
        rows.append(
            Row(
                f"memory of a step with dropout, {workloads.KINDS[kind].title}",
                figure,
                "share of the weights",
                figure.median,
                {"naive": memory.shown(memory.above(naive, bare, SIZES[kind]))},
                "",
                at_most=LIMITS[kind],
            )
        )
    if not rows:
        raise RuntimeError("no kind could be measured")
    measure.report("memory_layers", rows, method=peak.method())


if __name__ == "__main__":
    main()
