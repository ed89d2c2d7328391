"""How the time of a training step grows: each of width, depth, batch and time doubled.

    python benchmarks/growth.py

A stack of Dense layers and an LSTM, with weight dropout by tfwd, naively, and without; the LSTM by
PyTorch too. An exponent of 1 means twice the cost for twice the size. growth_memory.py does the
same for memory.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import measure
import plots
from measure import Row, Spread

# What is doubled: the model, its fixed sizes, the values.
SWEEPS: dict[str, tuple[str, dict[str, int], list[int]]] = {
    "width": ("dense", {"depth": 2, "batch": 64}, [512, 1024, 2048, 4096]),
    "depth": ("dense", {"width": 1536, "batch": 64}, [1, 2, 4, 8]),
    "batch": ("dense", {"width": 1536, "depth": 2}, [32, 64, 128, 256]),
    "units": ("lstm", {"time": 35, "batch": 20}, [128, 256, 512, 1024]),
    "time": ("lstm", {"units": 512, "batch": 20}, [16, 32, 64, 128]),
}
LABELS = {"dropout": "tfwd", "naive dropout": "naive", "bare": "without", "PyTorch": "PyTorch"}


def make(axis: str, value: int, way: str) -> Callable[[], Any]:
    """The step of one point."""
    import workloads

    model, fixed, _ = SWEEPS[axis]
    sizes = {**fixed, axis: value}
    if way == "PyTorch":
        import torch_workloads

        return torch_workloads.lstm_step(**sizes)
    return workloads.train_step(getattr(workloads, model)(**sizes), way)


def ways(axis: str, has_torch: bool) -> list[str]:
    """The ways that are compared along an axis."""
    peers = ["PyTorch"] if has_torch and SWEEPS[axis][0] == "lstm" else []
    return ["dropout", "naive dropout", "bare", *peers]


def exponents(values: Sequence[float], costs: Sequence[float]) -> Spread:
    """The log-log slopes of the doublings; low and high are the least and the greatest.

    The slope between two neighbours is `log(cost_2 / cost_1) / log(value_2 / value_1)`.
    """
    slopes = [
        math.log(costs[i + 1] / costs[i]) / math.log(values[i + 1] / values[i])
        for i in range(len(values) - 1)
    ]
    return Spread(statistics.median(slopes), min(slopes), max(slopes))


def rows(what: str, costs: dict[str, dict[str, list[float]]]) -> list[Row]:
    """A row an axis: our exponent, and the others'."""
    found = []
    for axis, by_way in costs.items():
        slopes = {way: exponents(SWEEPS[axis][2], cost) for way, cost in by_way.items()}
        ours = slopes.pop("dropout")
        peers = {LABELS[way]: slope.median for way, slope in slopes.items()}
        title = {"dense": "Dense", "lstm": "LSTM"}[SWEEPS[axis][0]]
        claim = f"{what} of a step as {axis} grows, {title}"
        found.append(Row(claim, ours, "exponent", ours.median, peers, ""))
    return found


def panels(costs: dict[str, dict[str, list[float]]]) -> list[plots.Panel]:
    """What is drawn: a panel an axis, titled by what stays as it is."""
    return [
        plots.Panel(
            ", ".join(f"{size} {value}" for size, value in SWEEPS[axis][1].items()),
            axis,
            SWEEPS[axis][2],
            {LABELS[way]: cost for way, cost in by_way.items()},
        )
        for axis, by_way in costs.items()
    ]


def main() -> None:
    """Measures, draws, and reports a row an axis."""
    options = measure.parser(__doc__)
    options.add_argument("--seconds", type=float, default=1.2, help="time for a point's rounds")
    options.add_argument("--plots", default=str(plots.FOLDER), help="folder for the plots")
    chosen = options.parse_args()
    has_torch = measure.attempt(lambda: __import__("torch"), "PyTorch") is not None
    measure.equal_threads()
    import keras

    costs: dict[str, dict[str, list[float]]] = {}
    for axis, (_, _, values) in SWEEPS.items():
        costs[axis] = {way: [] for way in ways(axis, has_torch)}
        for value in values:
            steps = {way: make(axis, value, way) for way in costs[axis]}
            found = measure.alternate(
                steps, seconds=chosen.seconds, least=3, warmup=2, title=f"{axis} {value}"
            )
            for way, times in found.items():
                costs[axis][way].append(1e3 * statistics.median(times))
            del steps
            keras.backend.clear_session()
            gc.collect()
    for model, title in (("dense", "Dense"), ("lstm", "LSTM")):
        drawn = {axis: cost for axis, cost in costs.items() if SWEEPS[axis][0] == model}
        title = f"Time of a training step, {title}"
        plots.draw(title, "ms", panels(drawn), chosen.plots, f"{model}_time")
    points = {axis: {"values": SWEEPS[axis][2], "ms": cost} for axis, cost in costs.items()}
    measure.report("growth", rows("time", costs), points=points)


if __name__ == "__main__":
    main()
