"""Pictures of a sweep: validation perplexity against each key, and the keys together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tfwd.lm.keys import shown
from tfwd.lm.sweeps.combined import pairs, together
from tfwd.lm.sweeps.rows import FAILED, Row, ranked
from tfwd.lm.sweeps.scales import Scale, perplexity_axis
from tfwd.lm.sweeps.table import short_names
from tfwd.tuning.space import Spec

POINT, LINE, BEST, BAD = "#4477aa", "#222222", "#cc6677", "#aa3377"
_ENOUGH = 6  # trials, at different places, for a smoothed line


def draw(rows: Sequence[Row], space: Mapping[str, Spec], folder: Path, title: str) -> list[Path]:
    """Draws all pictures for which there are enough trials.

    Args:
        rows: the trials.
        space: what was varied.
        folder: for the PNG files.
        title: above each picture; it is followed by how many trials failed, if any did.

    Returns:
        The files: `KEY.png` for each key and, of more than one key, `together.png` (each trial a
        line through its values) and `pairs.png`.
    """
    done, failed = ranked(rows), [row for row in rows if row.status == FAILED]
    if not done:
        return []
    if failed:
        title = f"{title}; {len(failed)} of {len(rows)} trials failed"
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
        figure = Figure(figsize=(2.6 + 1.7 * len(space), 4.5), dpi=120, layout="constrained")
        together(figure, done, space)
        figure.suptitle(title, wrap=True)
        made.append(_save(figure, folder / "together.png"))
        size = 1.8 + 2.4 * (len(space) - 1)
        figure = Figure(figsize=(size + 1.6, size + 0.5), dpi=120, layout="constrained")
        pairs(figure, done, space)
        figure.suptitle(title, wrap=True)
        made.append(_save(figure, folder / "pairs.png"))
    return made


def against(axes: Axes, done: Sequence[Row], failed: Sequence[Row], key: str, spec: Spec) -> None:
    """Validation perplexity against one key: points, the best, failed ones, a smoothed line.

    A trial of fewer epochs than the longest (Hyperband stops most of them early) is drawn lighter,
    and is no part of the line. A failed one has no perplexity: it stands above the axes.
    """
    scale = Scale(spec)
    longest = max(row.epochs or 0 for row in done)
    full = [row for row in done if row.epochs == longest] if _uneven(done) else list(done)
    short = [row for row in done if row not in full]
    for group, alpha, label in (
        (short, 0.35, "stopped earlier"),
        (full, 0.9, f"after {longest} epochs"),
    ):
        axes.plot(
            [scale.at(row.values[key]) for row in group],
            [row.perplexity or 0.0 for row in group],
            "o",
            color=POINT,
            alpha=alpha,
            ms=6,
            mew=0,
            ls="",
            label=label if short else None,
        )
    if scale.names is None:
        smooth = smoothed([(scale.at(r.values[key]), r.loss or 0.0) for r in full], scale.log)
        if smooth is not None:
            axes.plot(smooth[0], np.exp(smooth[1]), color=LINE, lw=1.3, label="smoothed")
    best = done[0]
    axes.plot(
        [scale.at(best.values[key])],
        [best.perplexity or 0.0],
        color=BEST,
        marker="*",
        ms=16,
        ls="",
        label=f"best: {best.perplexity:,.2f} at {shown(best.values[key])}",
        clip_on=False,
        zorder=5,
    )
    perplexity_axis(axes, [row.perplexity or 0.0 for row in done])
    scale.label(axes.xaxis)
    if failed:
        axes.plot(
            [scale.at(row.values[key]) for row in failed],
            [1.03] * len(failed),
            "x",
            color=BAD,
            ms=7,
            mew=2,
            label="failed: no perplexity",
            clip_on=False,
            transform=axes.get_xaxis_transform(),  # the height is none of the axis's
        )
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


def _uneven(done: Sequence[Row]) -> bool:
    """Whether trials were given different numbers of epochs, as Hyperband does."""
    return len({row.budget for row in done}) > 1


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    return path
