"""Growth of the peak memory of a training step when width, depth, batch or time doubles.

    python benchmarks/step_memory_growth.py

The points are the same as in step_time_growth.py. All points of one way share a process. Each model
is deleted before the next one is made. common/peak_memory.py says how memory is measured.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

from common import growth_plots, measure, peak_memory, step_growth


def sweep(axis: str, way: str) -> Callable[[], list[float]]:
    """Returns a function that measures the peaks of all points of an axis in MiB, in a child."""
    if way != "PyTorch":
        measure.equal_threads()

    def run() -> list[float]:
        found = []
        for value in step_growth.SWEEPS[axis][2]:
            step: Any = step_growth.make(axis, value, way)
            found.append(statistics.median(peak_memory.peaks(step)) / peak_memory.MIB)
            del step
            if way != "PyTorch":
                import keras

                keras.backend.clear_session()
            gc.collect()
        return found

    return run


def main() -> None:
    """Measures, draws, and reports a row for each axis."""
    options = measure.parser(__doc__)
    options.add_argument("--plots", default=str(growth_plots.FOLDER), help="folder for the plots")
    folder = options.parse_args().plots
    has_torch = measure.module("torch", "PyTorch") is not None
    configurations = {
        f"{axis}: {way}": (axis, way)
        for axis in step_growth.SWEEPS
        for way in step_growth.ways(axis, has_torch)
    }
    found = peak_memory.in_children(sweep, configurations, steps=None)
    costs: dict[str, dict[str, list[float]]] = {axis: {} for axis in step_growth.SWEEPS}
    for name, (axis, way) in configurations.items():
        peaks = found[name]
        if isinstance(peaks, str):
            measure.CONSOLE.print(f"without {name}: {peaks}", style="yellow")
        else:
            costs[axis][way] = peaks
    title = "Peak memory of a training step above the level before it"
    step_growth.draw(title, "MiB", costs, folder, "memory")
    rows, points = step_growth.rows("memory", costs), step_growth.points("MiB", costs)
    measure.report("step_memory_growth", rows, method=peak_memory.method_text(), points=points)


if __name__ == "__main__":
    main()
