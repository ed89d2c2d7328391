"""Plot of the gradient's moments over the steps of a training.

The axes are logarithmic and cannot show infinity and zero, though both are frequent. Infinity is
therefore marked at a panel's upper edge, and zero at its lower edge, in one row per line.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfwd.gradients.statistics import Record, average

# The number of weights with a color and a name: the number of colors that a reader can distinguish.
NAMED = 10
OTHERS = "#bbbbbb"
# The largest number of points of a line that a reader can distinguish.
POINTS = 200
# As shares of a panel's height: a row of marks, and the free space at an edge.
ROW, EDGE = 0.018, 0.03
INFINITE, ZERO = ("^", "infinite"), ("v", "zero")


class Line(NamedTuple):
    """Line of a panel.

    Attributes:
        values: list of float, one per step.
        style: dict of matplotlib's drawing options.
    """

    values: list[float]
    style: dict[str, Any]


def write_plot(records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Draws the statistics over the steps: the model's above, each weight's below.

    If there are more than ten weights, the ten with the largest mean of squares have a color and a
    name. The others are thin grey lines. More than 200 records are grouped and averaged with
    `tfwd.gradients.statistics.average`.

    Args:
        records: as in `GradientSquaredMean.records`, at least one.
        path: path of the file. Its suffix determines the format.

    Raises:
        ValueError: If there are no records.
    """
    if not records:
        raise ValueError("records is empty: write_plot() needs at least one record")
    records = _grouped(records)
    # It needs no display. The import is here, because it is slow.
    figure = importlib.import_module("matplotlib.figure").Figure((11, 8), layout="constrained")
    (means, noise), (squares, ratios) = figure.subplots(2, 2)
    steps = [record["step"] for record in records]
    styles = _styles(records)

    def of_model(key: str, **style: Any) -> Line:
        return Line([record[key] for record in records], {"markersize": 8, **style})

    def of_weights(key: str) -> list[Line]:
        return [
            Line([record["variables"][path][key] for record in records], style)
            for path, style in styles.items()
        ]

    both = [
        of_model("squared_mean", color="C0", label="mean of squares"),
        of_model("square_of_mean", color="C1", label="square of the mean"),
    ]
    marked = set()
    for axis, title, lines in (
        (means, "gradient, mean over all entries", both),
        (noise, "gradient noise scale, in examples", [of_model("noise_scale", color="C0")]),
        (squares, "mean of squares of each weight", of_weights("squared_mean")),
        (ratios, "signal-to-noise ratio of each weight", of_weights("signal_to_noise")),
    ):
        axis.set_title(title, pad=26 if axis is means else None)
        marked |= _panel(axis, steps, lines)
    means.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, fontsize=9, frameon=False)
    _legend(figure, squares, marked, len(styles))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _grouped(records: Sequence[Record]) -> Sequence[Record]:
    size = -(-len(records) // POINTS)
    if size == 1:
        return records
    groups = [records[start : start + size] for start in range(0, len(records), size)]
    return [{"step": group[0]["step"], **average(group)} for group in groups]


def _styles(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Returns the style of each weight, by its path. Named weights come last, so on top."""
    size = {path: 0.0 for path in records[0]["variables"]}
    for record in records:
        for path, values in record["variables"].items():
            if math.isfinite(values["squared_mean"]):
                size[path] += values["squared_mean"]
    largest = sorted(size, key=lambda path: -size[path])[:NAMED]
    named = [path for path in size if path in largest]
    grey = {"color": OTHERS, "linewidth": 0.6, "markersize": 3, "zorder": 1.5}
    styles: dict[str, dict[str, Any]] = {path: grey for path in size if path not in named}
    for number, path in enumerate(named):
        styles[path] = {"color": f"C{number}", "markersize": 8, "label": path}
    return styles


def _panel(axis: Any, steps: list[int], lines: list[Line]) -> set[tuple[str, str]]:
    """Draws lines on a logarithmic axis. Returns the marks that it used."""
    axis.set_yscale("log")
    for values, style in lines:
        shown = [v if math.isfinite(v) and v > 0 else math.nan for v in values]
        style = {**style, "markersize": style["markersize"] * (1 if len(steps) <= 60 else 0.6)}
        axis.plot(steps, shown, linewidth=style.pop("linewidth", 1.2), marker=".", **style)
    above = _mark(axis, steps, lines, INFINITE, lambda v: v == math.inf)
    below = _mark(axis, steps, lines, ZERO, lambda v: v == 0)
    shown = [v for values, _ in lines for v in values if math.isfinite(v) and v > 0]
    _limits(axis, shown, EDGE + ROW * below, EDGE + ROW * above)
    ticker = importlib.import_module("matplotlib.ticker")
    axis.xaxis.set_major_locator(ticker.MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    room = 0.03 * (steps[-1] - steps[0]) or 0.5
    axis.set_xlim(steps[0] - room, steps[-1] + room)
    axis.set_xlabel("step")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, axis="y", color="#e4e4e4", linewidth=0.8)
    axis.set_axisbelow(True)
    return ({INFINITE} if above else set()) | ({ZERO} if below else set())


def _mark(axis: Any, steps: list[int], lines: list[Line], mark: tuple[str, str], found: Any) -> int:
    """Marks the steps whose value passes a test. Returns the number of rows of marks."""
    rows: dict[str, tuple[set[int], dict[str, Any]]] = {}  # by color; all grey lines share one row
    for values, style in lines:
        there = {step for step, value in zip(steps, values, strict=True) if found(value)}
        if there:
            rows.setdefault(style["color"], (set(), style))[0].update(there)
    for row, (color, (there, _)) in enumerate(rows.items()):
        height = EDGE / 2 + ROW * (row + 0.5)
        axis.plot(
            sorted(there),
            [height if mark is ZERO else 1 - height] * len(there),
            transform=axis.get_xaxis_transform(),  # x: steps, y: shares of the panel
            linestyle="none",
            marker=mark[0],
            markersize=4,
            markerfacecolor="none",
            color=color,
        )
    return len(rows)


def _limits(axis: Any, values: list[float], below: float, above: float) -> None:
    """Sets at least two ticks at 1, 2, 5 times powers of ten, and leaves space at the edges."""
    ticker = importlib.import_module("matplotlib.ticker")
    axis.yaxis.set_minor_locator(ticker.NullLocator())
    if not values:
        axis.yaxis.set_major_locator(ticker.NullLocator())
        axis.text(0.5, 0.5, "no finite value above zero", ha="center", transform=axis.transAxes)
        return
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [tick * 10.0**power for power in powers for tick in (1, 2, 5)]
    if sum(low <= tick <= high for tick in ticks) < 2:
        low = max(tick for tick in ticks if tick <= low)
        high = min((tick for tick in ticks if tick > low and tick >= high), default=high)
    if high / low > 1e4:
        ticks = [10.0**power for power in powers[:: 1 + len(powers) // 10]]
    span = math.log(high / low) / (1 - below - above)
    axis.set_ylim(low * math.exp(-below * span), high * math.exp(above * span))
    shown = [tick for tick in ticks if low <= tick <= high]  # no tick is among the marks
    axis.yaxis.set_major_locator(ticker.FixedLocator(shown))
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))


def _legend(figure: Any, axis: Any, marked: set[tuple[str, str]], count: int) -> None:
    """Draws the names of the weights and the marks below all panels."""
    line = importlib.import_module("matplotlib.lines").Line2D
    handles, labels = axis.get_legend_handles_labels()
    if count > len(handles):
        handles.append(line([], [], color=OTHERS, linewidth=0.6))
        labels.append(f"the other {count - len(labels)} weights")
    for marker, label in (INFINITE, ZERO):
        if (marker, label) in marked:
            style = {"color": "black", "markerfacecolor": "none", "markersize": 5}
            handles.append(line([], [], linestyle="none", marker=marker, **style))
            labels.append(label)
    columns = max(1, min(4, 150 // (8 + max(len(label) for label in labels))))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False
    )
