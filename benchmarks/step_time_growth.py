"""Growth of the time of a training step when width, depth, batch or time doubles.

    python benchmarks/step_time_growth.py

The models are a stack of Dense layers and an LSTM. They run with tfwd's weight dropout, with naive
weight dropout, and without dropout. The LSTM also runs in PyTorch. An exponent of 1 means twice the
cost for twice the size. step_memory_growth.py does the same for memory.
"""

from __future__ import annotations

import gc
import statistics

from common import growth_plots, measure, step_growth


def main() -> None:
    """Measures, draws, and reports a row for each axis."""
    options = measure.parser(__doc__, seconds=1.2, of="a point's rounds")
    options.add_argument("--plots", default=str(growth_plots.FOLDER), help="folder for the plots")
    chosen = options.parse_args()
    has_torch = measure.module("torch", "PyTorch") is not None
    measure.equal_threads()
    import keras

    costs: dict[str, dict[str, list[float]]] = {}
    for axis, (_, _, values) in step_growth.SWEEPS.items():
        costs[axis] = {way: [] for way in step_growth.ways(axis, has_torch)}
        for value in values:
            steps = {way: step_growth.make(axis, value, way) for way in costs[axis]}
            found = measure.alternate(
                steps, seconds=chosen.seconds, least=3, warmup=2, title=f"{axis} {value}"
            )
            for way, times in found.items():
                costs[axis][way].append(1e3 * statistics.median(times))
            del steps
            keras.backend.clear_session()
            gc.collect()
    step_growth.draw("Time of a training step", "ms", costs, chosen.plots, "time")
    measure.report(
        "step_time_growth",
        step_growth.rows("time", costs),
        points=step_growth.points("ms", costs),
    )


if __name__ == "__main__":
    main()
