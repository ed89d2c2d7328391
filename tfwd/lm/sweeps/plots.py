"""Pictures of a sweep: validation perplexity against each key, and the keys together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from tfwd.lm.keys import shown
from tfwd.lm.sweeps.board import short_names
from tfwd.lm.sweeps.rows import FAILED, Row, ranked
from tfwd.tuning.space import Choice, Spec

POINT, LINE, BEST, BAD = "#4477aa", "#222222", "#cc6677", "#aa3377"
_ENOUGH = 6  # trials, at different places, for a smoothed line
_COLOURS = colormaps["viridis"]


class Scale:
    """Where a key's values stand on an axis: numbers at themselves, other choices one by one.

    Args:
        spec: the key's declaration.
    """

    def __init__(self, spec: Spec):
        self.spec = spec
        self.names: list[str] | None = None
        if isinstance(spec, Choice) and not spec.numbers:
            self.names = [shown(value) for value in spec.values]
        self.log = bool(getattr(spec, "log", False))

    def at(self, value: Any) -> float:
        """The place of a value, in the axis's own units."""
        return float(self.names.index(shown(value)) if self.names is not None else value)

    def share(self, value: Any) -> float:
        """The place between the lowest, 0, and the highest value, 1."""
        ends = [self.at(end) for end in self.spec.ends]
        low, high, x = min(ends), max(ends), self.at(value)
        if self.log:
            low, high, x = math.log(low), math.log(high), math.log(x)
        return 0.5 if low == high else (x - low) / (high - low)

    def label(self, axis: Any) -> None:
        """Sets an x or y axis up."""
        if self.names is not None:
            axis.set_ticks(range(len(self.names)), self.names)


def draw(rows: Sequence[Row], space: Mapping[str, Spec], folder: Path, title: str) -> list[Path]:
    """Draws all pictures for which there are enough trials.

    Args:
        rows: the trials.
        space: what was varied.
        folder: for the PNG files.
        title: above each picture.

    Returns:
        The files: `KEY.png` for each key and, of more than one key, `together.png` (each trial a
        line through its values) and `pairs.png`.
    """
    done, failed = ranked(rows), [row for row in rows if row.status == FAILED]
    if not done:
        return []
    names = short_names(space)
    made = []
    for key, spec in space.items():
        figure = Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        against(axes, done, failed, key, spec)
        axes.set_xlabel(key)
        figure.suptitle(title)
        made.append(_save(figure, folder / f"{names[key]}.png"))
    if len(space) > 1:
        figure = Figure(figsize=(1.6 + 1.7 * len(space), 4.5), dpi=120, layout="constrained")
        together(figure, done, space)
        figure.suptitle(title)
        made.append(_save(figure, folder / "together.png"))
        size = 1.2 + 2.4 * (len(space) - 1)
        figure = Figure(figsize=(size + 1.2, size), dpi=120, layout="constrained")
        pairs(figure, done, space)
        made.append(_save(figure, folder / "pairs.png"))
    return made


def against(axes: Axes, done: Sequence[Row], failed: Sequence[Row], key: str, spec: Spec) -> None:
    """Validation perplexity against one key: points, the best, failed ones, a smoothed line.

    A trial of fewer epochs than the longest (Hyperband stops most of them early) is drawn lighter,
    and is no part of the line.
    """
    scale = Scale(spec)
    longest = max(row.epochs or 0 for row in done)
    full = [row for row in done if row.epochs == longest] if _uneven(done) else list(done)
    short = [row for row in done if row not in full]
    if scale.log:
        axes.set_xscale("log")
    for group, alpha in ((short, 0.35), (full, 0.9)):
        x = [scale.at(row.values[key]) for row in group]
        label = f"after {longest} epochs" if short and group is full else None
        if short and group is short:
            label = "stopped earlier"
        axes.plot(
            x,
            [_height(row) for row in group],
            "o",
            color=POINT,
            alpha=alpha,
            ms=6,
            mew=0,
            ls="",
            label=label,
        )
    if scale.names is None:
        smooth = smoothed([(scale.at(r.values[key]), r.loss or 0.0) for r in full], scale.log)
        if smooth is not None:
            axes.plot(smooth[0], np.exp(smooth[1]), color=LINE, lw=1.3, label="smoothed")
    best = done[0]
    axes.plot(
        [scale.at(best.values[key])],
        [_height(best)],
        color=BEST,
        marker="*",
        ms=16,
        ls="",
        label=f"best: {best.perplexity:,.2f} at {shown(best.values[key])}",
        clip_on=False,
        zorder=5,
    )
    _perplexity_axis(axes, [_height(row) for row in done])
    if failed:
        top = axes.get_ylim()[1]
        x = [scale.at(row.values[key]) for row in failed]
        axes.plot(x, [top] * len(x), "x", color=BAD, ms=7, mew=2, label="failed", clip_on=False)
    scale.label(axes.xaxis)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="y", color="#dddddd", lw=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize="small")


def smoothed(
    points: Sequence[tuple[float, float]], log: bool = False
) -> tuple[np.ndarray, np.ndarray] | None:
    """A line through points: at each place the straight line fitted with weights around it.

    The weights are a Gaussian in the distance, whose deviation is a seventh of the points' range.

    Args:
        points: (x, y).
        log: measure distances between logarithms.

    Returns:
        x and y of the line; None if there are too few places for one.

    Example:
        >>> x, y = smoothed([(i / 10, 2 + 3 * i / 10) for i in range(9)])
        >>> bool(np.allclose(y, 2 + 3 * x))
        True
    """
    x = np.array([point[0] for point in points])
    y = np.array([point[1] for point in points])
    if len(np.unique(x)) < _ENOUGH:
        return None
    x = np.log(x) if log else x
    places = np.linspace(x.min(), x.max(), 80)
    deviation = (x.max() - x.min()) / 7
    line = []
    for place in places:
        root = np.exp(-(((x - place) / deviation) ** 2) / 4)  # of the weight
        design = np.stack([np.ones_like(x), x - place], axis=1)
        line.append(np.linalg.lstsq(design * root[:, None], y * root, rcond=None)[0][0])
    return (np.exp(places) if log else places), np.array(line)


def together(figure: Figure, done: Sequence[Row], space: Mapping[str, Spec]) -> None:
    """Parallel coordinates: an axis a key, a line a trial, coloured by its perplexity."""
    axes = figure.add_subplot()
    scales = {key: Scale(spec) for key, spec in space.items()}
    colour = _colour([_height(row) for row in done])
    for rank, row in reversed(list(enumerate(done))):
        y = [scale.share(row.values[key]) for key, scale in scales.items()]
        axes.plot(
            range(len(y)),
            y,
            color=colour.to_rgba(np.array(_height(row))),
            lw=3.5 if rank == 0 else 1.3,
            alpha=1.0 if rank == 0 else 0.75,
        )
    for place, (key, scale) in enumerate(scales.items()):
        axes.axvline(place, color="#999999", lw=1)
        texts = scale.names or [shown(end) for end in (space[key].ends[0], space[key].ends[-1])]
        heights = np.linspace(0, 1, len(texts)) if len(texts) > 1 else [0.5]
        if isinstance(space[key], Choice) and scale.names is None:
            texts = [shown(value) for value in space[key].ends]
            heights = [scale.share(value) for value in space[key].ends]
        for height, text in zip(heights, texts, strict=True):
            axes.annotate(text, (place, height), xytext=(5, 0), textcoords="offset points",
                          va="center", fontsize="small",
                          bbox={"fc": "white", "ec": "none", "alpha": 0.8, "pad": 1})  # fmt: skip
    axes.set_xticks(range(len(scales)), list(short_names(space).values()))
    axes.set_yticks([])
    axes.set_xlim(-0.15, len(scales) - 0.6)
    axes.set_ylim(-0.05, 1.05)
    axes.spines[:].set_visible(False)
    _colour_bar(figure, colour, axes)


def pairs(figure: Figure, done: Sequence[Row], space: Mapping[str, Spec]) -> None:
    """Each two keys against each other, the trials coloured by perplexity, the best a star."""
    keys, names = list(space), short_names(space)
    scales = {key: Scale(spec) for key, spec in space.items()}
    colour = _colour([_height(row) for row in done])
    grid = figure.subplots(len(keys) - 1, len(keys) - 1, squeeze=False)
    for i, vertical in enumerate(keys[1:]):
        for j, horizontal in enumerate(keys[:-1]):
            axes = grid[i][j]
            if j > i:
                axes.set_visible(False)
                continue
            if scales[horizontal].log:
                axes.set_xscale("log")
            if scales[vertical].log:
                axes.set_yscale("log")
            for rank, row in reversed(list(enumerate(done))):
                axes.plot(
                    scales[horizontal].at(row.values[horizontal]),
                    scales[vertical].at(row.values[vertical]),
                    marker="*" if rank == 0 else "o",
                    ms=15 if rank == 0 else 8,
                    mec="white",
                    mew=0.6,
                    color=BEST if rank == 0 else colour.to_rgba(np.array(_height(row))),
                    clip_on=False,
                )
            scales[horizontal].label(axes.xaxis)
            scales[vertical].label(axes.yaxis)
            axes.spines[["top", "right"]].set_visible(False)
            if i == len(keys) - 2:
                axes.set_xlabel(names[horizontal])
            if j == 0:
                axes.set_ylabel(names[vertical])
    _colour_bar(figure, colour, grid.ravel().tolist())


def _height(row: Row) -> float:
    """The perplexity of a trial that is done."""
    assert row.perplexity is not None
    return row.perplexity


def _uneven(done: Sequence[Row]) -> bool:
    """Whether trials were given different numbers of epochs, as Hyperband does."""
    return len({row.budget for row in done}) > 1


def _perplexity_axis(axes: Axes, values: Sequence[float]) -> None:
    low, high = min(values), max(values)
    if high > 3 * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7), numticks=12))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_ylabel("validation perplexity")


def _colour(values: Sequence[float]) -> ScalarMappable:
    low, high = min(values), max(values)
    return ScalarMappable(LogNorm(low, high if high > low else low * 1.01), _COLOURS)


def _colour_bar(figure: Figure, colour: ScalarMappable, axes: Any) -> None:
    label = "validation perplexity"
    bar = figure.colorbar(colour, ax=axes, label=label, pad=0.02, aspect=35, fraction=0.05)
    bar.set_ticks(list(np.geomspace(*colour.get_clim(), 5)))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.ax.minorticks_off()


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    return path
