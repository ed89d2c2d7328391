"""Memory over time in a training step: the plot of docs/recompute.md.

    python benchmarks/memory_over_a_step.py

The model has twelve Dense layers of 3072 x 3072 with relu, batch 64, SGD. Each way runs in a
separate process (see common/peak_memory.py). A thread reads the resident set every millisecond.
step_memory_dense.py compares the peaks. This script shows when the peaks occur: the stored weights
add up layer by layer in forward.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from common import measure, peak_memory
from common.growth_plots import COLOURS
from common.measure import Row, Spread

WAYS = {"without": "bare", "naive": "naive dropout", "tfwd": "dropout"}
LABELS = {
    "without": "no dropout",
    "naive": "stateless_dropout, kept",
    "tfwd": "tfwd, drawn again",
}
BYTES = 12 * 3072 * 3072 * 4
STATM = Path("/proc/self/statm")
PAGE = 4096


def memory_sampler(way: str) -> object:
    """Returns a function that runs a step and samples `[share of the step, bytes]`.

    The bytes are above the level before the step.
    """
    measure.equal_threads()
    from common import layer_stacks

    step = layer_stacks.train_step("dense", way)

    def run() -> list[list[float]]:
        for _ in range(3):
            step()
        samples: list[tuple[float, int]] = []
        done = threading.Event()

        def sample() -> None:
            while not done.is_set():
                samples.append((time.perf_counter(), int(STATM.read_text().split()[1]) * PAGE))
                time.sleep(0.001)

        peak_memory.release_free_memory()
        watcher = threading.Thread(target=sample)
        watcher.start()
        time.sleep(0.02)
        begin = time.perf_counter()
        step()
        end = time.perf_counter()
        time.sleep(0.02)
        done.set()
        watcher.join()
        level = np.median([held for at, held in samples if at < begin] or [samples[0][1]])
        kept = [(at, held) for at, held in samples if begin <= at <= end]
        return [[(at - begin) / (end - begin), float(held - level)] for at, held in kept]

    return run


def draw(curves: dict[str, list[list[float]]], path: Path) -> None:
    """Draws the plot."""
    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for name, samples in curves.items():
        at, held = np.array(samples).T
        axes.plot(at, held / BYTES, color=COLOURS[name], lw=2, label=LABELS[name])
    axes.set(
        xlabel="time, as a share of the step",
        ylabel="memory above rest / bytes of the weights",
        xlim=(0, 1),
        ylim=(0, None),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Measures, draws, and reports the peaks."""
    options = measure.parser(__doc__)
    root = Path(__file__).resolve().parents[1]
    options.add_argument(
        "--plot", default=str(root / "docs" / "memory_over_a_step.png"), help="PNG to write"
    )
    plot = Path(options.parse_args().plot)
    found = peak_memory.in_children(
        memory_sampler, {name: (way,) for name, way in WAYS.items()}, steps=None
    )
    curves = {name: samples for name, samples in found.items() if isinstance(samples, list)}
    if curves:
        draw(curves, plot)
    tops = {name: max(held for _, held in samples) / BYTES for name, samples in curves.items()}
    rows = []
    if "tfwd" in tops:
        peers = {LABELS[name]: top for name, top in tops.items() if name != "tfwd"}
        top = tops["tfwd"]
        claim = "highest point of memory in a step, 12 Dense 3072x3072, over the weights' bytes"
        rows.append(Row(claim, Spread.of([top]), "share", top, peers, unit=""))
    measure.report("memory_over_a_step", rows)


if __name__ == "__main__":
    main()
