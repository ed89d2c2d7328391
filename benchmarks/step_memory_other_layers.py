"""Peak memory of a training step with weight dropout, for each kind of layer other than Dense.

    python benchmarks/step_memory_other_layers.py [--kinds conv gru ...]

The script does the same as step_memory_dense.py, for convolutions, einsums, embeddings and
attention. It also measures layers without a rule: a GRU and a custom layer.
"""

from __future__ import annotations

from common import measure, memory_above_plain_step, peak_memory

LIMITS = {
    "conv": 0.2,
    "einsum": 0.2,
    "embedding": 0.2,
    "attention": 0.2,
    "gru": 0.25,
    "user": 0.25,
}
# Bytes of the parametrized weights: number of layers times bytes per layer.
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
    """Measures, and reports a row for each kind."""
    options = measure.parser(__doc__)
    options.add_argument("--steps", type=int, default=3, help="steps measured in each process")
    options.add_argument("--kinds", nargs="+", choices=LIMITS, default=list(LIMITS))
    chosen = options.parse_args()
    configurations = {f"{kind}: {way}": (kind, way) for kind in chosen.kinds for way in WAYS}
    found = peak_memory.in_children(
        memory_above_plain_step.layer_stack_step, configurations, steps=chosen.steps
    )
    from common import layer_stacks

    rows = []
    for kind in chosen.kinds:
        bare, ours, naive = (found[f"{kind}: {way}"] for way in WAYS)
        figure = memory_above_plain_step.above(ours, bare, SIZES[kind])
        peers = {
            "naive": memory_above_plain_step.shown(
                memory_above_plain_step.above(naive, bare, SIZES[kind])
            )
        }
        title = f"dropout, {layer_stacks.KINDS[kind].title}"
        rows += memory_above_plain_step.rows(kind, title, figure, peers, LIMITS[kind])
    if not rows:
        raise RuntimeError("no kind could be measured: see the errors of the child processes above")
    measure.report("step_memory_other_layers", rows, method=peak_memory.method_text())


if __name__ == "__main__":
    main()
