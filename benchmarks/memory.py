"""Peak memory of a training step with perturbed weights, above the same step without.

    python benchmarks/memory.py

Twelve Dense layers of 3072 x 3072 with relu, batch 64, SGD. Each configuration is measured in a
process of its own (see peak.py). The figure is a share of the bytes of all perturbed weights: 1.00
is a second copy of the model.
"""

from __future__ import annotations

import measure
import peak
from measure import Row, Spread

KIND = "dense"
OURS = {"dropout": 0.12, "noise": 0.15, "both": 0.15}
BYTES = 12 * 3072 * 3072 * 4


def tensorflow(kind: str, way: str) -> object:
    """A step of `workloads.train_step`, made in the child."""
    measure.equal_threads()
    import workloads

    return workloads.train_step(kind, way)


def pytorch(way: str) -> object:
    """A step of `torch_workloads.train_step`, made in the child."""
    import torch_workloads

    return torch_workloads.train_step(way)


def above(with_: list[int] | str, without: list[int] | str, size: int) -> Spread | str:
    """The share of `size` bytes by which one peak is above the median of the other."""
    for found in (with_, without):
        if isinstance(found, str):
            return found
    base = Spread.of(without).median  # type: ignore[arg-type]
    return Spread.of([(value - base) / size for value in with_])  # type: ignore[operator]


def shown(share: Spread | str) -> float | str:
    """The median, or why there is none."""
    return share if isinstance(share, str) else share.median


def main() -> None:
    """Measures, and reports a row a way."""
    options = measure.parser(__doc__)
    options.add_argument("--steps", type=int, default=3, help="steps measured in each process")
    steps = options.parse_args().steps
    tf_ways = ["bare", *OURS, "fit", *(f"naive {way}" for way in OURS), "recompute_grad dropout"]
    torch_ways = ["bare", *OURS, "checkpoint dropout"]
    found = peak.in_children(tensorflow, {way: (KIND, way) for way in tf_ways}, steps=steps)
    found |= peak.in_children(pytorch, {f"PyTorch {way}": (way,) for way in torch_ways}, steps=1)
    share = {
        way: above(peaks, found["PyTorch bare" if "PyTorch" in way else "bare"], BYTES)
        for way, peaks in found.items()
    }
    rows = []
    for way, limit in OURS.items():
        peers = {"naive": shown(share[f"naive {way}"])}
        if way == "dropout":
            peers["recompute_grad"] = shown(share["recompute_grad dropout"])
        peers["PyTorch"] = shown(share[f"PyTorch {way}"])
        if way == "dropout":
            peers["PyTorch checkpoint"] = shown(share["PyTorch checkpoint dropout"])
        names = [(way, f"{way}, 12 Dense 3072x3072")]
        if way == "dropout":
            names.append(("fit", f"{way}, 12 Dense 3072x3072, by model.fit"))
        for ours, title in names:
            figure = share[ours]
            if isinstance(figure, str):
                measure.CONSOLE.print(f"without {ours}: {figure}", style="red")
                continue
            rows.append(
                Row(
                    f"memory of a step with {title}",
                    figure,
                    "share of the weights",
                    figure.median,
                    peers,
                    "",
                    at_most=limit,
                )
            )
    if not rows:
        raise RuntimeError("no configuration could be measured")
    levels = {way: shown(_of_all(peaks)) for way, peaks in found.items()}
    measure.report("memory", rows, method=peak.method(), peak_share=levels)


def _of_all(peaks: list[int] | str) -> Spread | str:
    """A peak itself, not above another, as a share of the weights."""
    return peaks if isinstance(peaks, str) else Spread.of([value / BYTES for value in peaks])


if __name__ == "__main__":
    main()
