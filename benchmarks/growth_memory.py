"""How the peak memory of a training step grows: each of width, depth, batch and time doubled.

    python benchmarks/growth_memory.py

The points of growth.py. Those of one way share a process, from which each model is gone before the
next one comes; see peak.py for what is measured.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

import growth
import measure
import peak
import plots


def sweep(axis: str, way: str) -> Callable[[], list[float]]:
    """A function that measures the peaks of all points of an axis, MiB; for a child."""
    if way != "PyTorch":
        measure.equal_threads()

    def run() -> list[float]:
        found = []
        for value in growth.SWEEPS[axis][2]:
            step: Any = growth.make(axis, value, way)
            found.append(statistics.median(peak.peaks(step)) / peak.MIB)
            del step
            if way != "PyTorch":
                import keras

                keras.backend.clear_session()
            gc.collect()
        return found

    return run


def main() -> None:
    """Measures, draws, and reports a row an axis."""
    options = measure.parser(__doc__)
    options.add_argument("--plots", default=str(plots.FOLDER), help="folder for the plots")
    folder = options.parse_args().plots
    has_torch = measure.attempt(lambda: __import__("torch"), "PyTorch") is not None
    configurations = {
        f"{axis}: {way}": (axis, way)
        for axis in growth.SWEEPS
        for way in growth.ways(axis, has_torch)
    }
    found = peak.in_children(sweep, configurations, steps=None)
    costs: dict[str, dict[str, list[float]]] = {axis: {} for axis in growth.SWEEPS}
    for name, (axis, way) in configurations.items():
        peaks = found[name]
        if isinstance(peaks, str):
            measure.CONSOLE.print(f"without {name}: {peaks}", style="yellow")
        else:
            costs[axis][way] = peaks
    for model, title in (("dense", "Dense"), ("lstm", "LSTM")):
        drawn = {axis: cost for axis, cost in costs.items() if growth.SWEEPS[axis][0] == model}
        title = f"Peak memory of a training step above the level before it, {title}"
        plots.draw(title, "MiB", growth.panels(drawn), folder, f"{model}_memory")
    points = {axis: {"values": growth.SWEEPS[axis][2], "MiB": cost} for axis, cost in costs.items()}
    measure.report(
        "growth_memory", growth.rows("memory", costs), method=peak.method(), points=points
    )


if __name__ == "__main__":
    main()
