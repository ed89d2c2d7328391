"""Plots of the benchmarks: cost against size, both axes logarithmic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

FOLDER = Path(__file__).resolve().parents[1] / "plots"
# tfwd has the strongest colour. The side without parametrizations is grey.
COLOURS = {"tfwd": "#c0392b", "naive": "#3b6ea5", "without": "#888888", "PyTorch": "#d68910"}
MARKERS = {"tfwd": "o", "naive": "s", "without": "^", "PyTorch": "D"}


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: Title above the axes.
        size: Name of the doubled size, on the horizontal axis.
        values: Values of the size.
        costs: dict from the name of a line to a cost for each value.
    """

    title: str
    size: str
    values: Sequence[float]
    costs: dict[str, Sequence[float]]


def draw(title: str, unit: str, panels: Sequence[Panel], folder: str | Path, name: str) -> Path:
    """Draws the panels in a row, writes `folder/name.png`, and returns that path."""
    figure, row = plt.subplots(
        1, len(panels), figsize=(3.3 * len(panels) + 0.6, 3.6), squeeze=False, layout="constrained"
    )
    for axes, panel in zip(row[0], panels, strict=True):
        for line, costs in panel.costs.items():
            axes.plot(
                panel.values,
                costs,
                color=COLOURS.get(line),
                marker=MARKERS.get(line, "o"),
                markersize=5,
                lw=2 if line == "tfwd" else 1.4,
                label=line,
                zorder=3 if line == "tfwd" else 2,
            )
        axes.set(xscale="log", yscale="log", xlabel=panel.size, title=panel.title)
        axes.set_xticks(panel.values, [f"{value:g}" for value in panel.values])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3, which="both", lw=0.5)
    row[0][0].set_ylabel(unit)
    # The legend of the panel with the most lines serves all panels.
    fullest = max(row[0], key=lambda axes: len(axes.get_lines()))
    figure.legend(
        *fullest.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
    )
    figure.suptitle(title)
    path = Path(folder) / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
