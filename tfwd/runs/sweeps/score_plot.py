"""Plots a sweep: the score against each key, side by side.

TensorBoard's HParams tab shows parallel coordinates, and each pair of keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from tfwd.runs.interfaces import Score
from tfwd.runs.settings.validators import shown
from tfwd.runs.sweeps.trial_rows import FAILED, Row, ranked
from tfwd.tuning.search_space import Choice, Int, Spec

POINT, LINE, BEST, BAD = "#4477aa", "#222222", "#cc6677", "#aa3377"
_ENOUGH = 6  # trials, at different values, for a smoothed line
_PANELS = 3  # panels side by side


def draw(
    rows: Sequence[Row], space: Mapping[str, Spec], score: Score, path: Path, title: str
) -> None:
    """Draws validation scores against each key.

    Each panel has a point per trial and a star for the best trial. Numeric keys with at least six
    different values also get a smoothed line. A trial with fewer epochs than the longest trial has
    a lighter point, and the line ignores it. (Hyperband stops most trials early.) A failed trial
    has no score, and is drawn above the axes.

    Args:
        rows: the trials. At least one trial is done.
        space: the varied keys, with their values.
        score: how a loss is shown.
        path: path of the PNG file.
        title: str. The title above the picture. The number of failed trials is added to it.
    """
    done, failed = ranked(rows), [row for row in rows if row.status == FAILED]
    if failed:
        title = f"{title}; {len(failed)} of {len(rows)} trials failed"
    across = min(_PANELS, len(space))
    down = math.ceil(len(space) / across)
    size = (4.2 * across + 0.6, 3.6 * down + 1.0) if across > 1 else (7, 4.8)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    panels = figure.subplots(down, across, sharey=True, squeeze=False).ravel()
    for axes, (key, spec) in zip(panels, space.items(), strict=False):
        _panel(axes, done, failed, key, spec, score)
    for axes in panels[len(space) :]:
        axes.set_visible(False)
    _score_axis(panels[0], [score.of_loss(_loss(row)) for row in done])
    for axes in panels[::across]:
        axes.set_ylabel(f"validation {score.name}")
    handles = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    named = {label: line for label, line in handles.items() if not label.startswith("_")}
    figure.legend(
        list(named.values()),
        list(named),
        loc="outside lower center",
        ncols=5 if across > 1 else 3,
        frameon=False,
    )
    figure.suptitle(title, wrap=True)
    figure.savefig(path)


def _panel(
    axes: Axes, done: Sequence[Row], failed: Sequence[Row], key: str, spec: Spec, score: Score
) -> None:
    names = _names(spec)
    log = names is None and bool(getattr(spec, "log", False))

    def position(row: Row) -> float:
        value = row.values[key]
        return float(value if names is None else names.index(shown(value)))

    def height(row: Row) -> float:
        return score.of_loss(_loss(row))

    longest = max(row.epochs or 0 for row in done)
    uneven = len({row.budget for row in done}) > 1  # such as with Hyperband
    full = [row for row in done if row.epochs == longest] if uneven else list(done)
    short = [row for row in done if row not in full]
    for group, alpha, label in (
        (short, 0.35, "stopped earlier"),
        (full, 0.9, f"after {longest} epoch{'s' * (longest != 1)}"),
    ):
        if group:
            x, y = [position(row) for row in group], [height(row) for row in group]
            axes.plot(x, y, "o", color=POINT, alpha=alpha, ms=6, mew=0, label=label)
    line = smoothed([(position(r), _loss(r)) for r in full], log) if names is None else None
    if line is not None:
        heights = [score.of_loss(loss) for loss in line[1]]
        axes.plot(line[0], heights, color=LINE, lw=1.3, label="smoothed")
    best = done[0]
    label = f"best: {height(best):,.2f}, trial {best.trial}"
    axes.plot(position(best), height(best), "*", color=BEST, ms=16, label=label, clip_on=False)
    if failed:
        axes.plot(
            [position(row) for row in failed],
            [1.03] * len(failed),
            "x",
            color=BAD,
            ms=7,
            mew=2,
            label=f"failed: no {score.name}",
            clip_on=False,
            transform=axes.get_xaxis_transform(),  # y is relative to the height of the panel
        )
    _key_axis(axes, spec, names, log)
    axes.set_xlabel(key)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="y", color="#dddddd", lw=0.8)
    axes.set_axisbelow(True)


def _names(spec: Spec) -> list[str] | None:
    """Returns the values of a `Choice` as tick labels; None for other specs."""
    if not isinstance(spec, Choice):
        return None
    values: Sequence[Any] = sorted(spec.values) if spec.numbers else spec.values
    return [shown(value) for value in values]


def _key_axis(axes: Axes, spec: Spec, names: Sequence[str] | None, log: bool) -> None:
    """Shows the whole range of the key, even if the trials cover only a part."""
    if names is not None:
        axes.set_xticks(range(len(names)), names)
        axes.set_xlim(-0.5, len(names) - 0.5)
        return
    low, high = min(spec.ends), max(spec.ends)
    margin = (high / low) ** 0.04 if log else (high - low) * 0.04 or 0.5
    if log:
        axes.set_xscale("log")
        axes.set_xlim(low / margin, high * margin)
    else:
        axes.set_xlim(low - margin, high + margin)
        axes.xaxis.set_major_locator(
            MaxNLocator(7, steps=[1, 2, 5, 10], integer=isinstance(spec, Int))
        )


def _score_axis(axes: Axes, values: Sequence[float]) -> None:
    """Makes the axis logarithmic if scores are positive and differ by more than a factor of 3."""
    if 0 < 3 * min(values) < max(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def _loss(row: Row) -> float:
    return math.nan if row.loss is None else row.loss


def smoothed(
    points: Sequence[tuple[float, float]], log: bool = False
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns a smooth line through points, by weighted linear regression at each position.

    The weights are a Gaussian function of the distance. Its standard deviation is a seventh of the
    points' range.

    Args:
        points: pairs (x, y).
        log: bool. Measures distances between logarithms.

    Returns:
        x and y of the line; None if there are too few different positions.

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
    positions = np.linspace(x.min(), x.max(), 80)
    deviation = (x.max() - x.min()) / 7
    line = []
    for position in positions:
        root = np.exp(-(((x - position) / deviation) ** 2) / 4)  # square root of the weight
        design = np.stack([np.ones_like(x), x - position], axis=1)
        line.append(np.linalg.lstsq(design * root[:, None], y * root, rcond=None)[0][0])
    return (np.exp(positions) if log else positions), np.array(line)
