"""Pictures of all keys at once: lines through the values of each trial, and each two keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tfwd.lm.sweeps.rows import Row
from tfwd.lm.sweeps.scales import Scale, colour_bar, colour_of, colours
from tfwd.lm.sweeps.table import short_names
from tfwd.tuning.space import Spec

_ASIDE = 0.012  # of the height: between two lines that come to one value
_FEW_TICKS = 5
_WIDTH = 17  # letters that a name has room for between two axes


def together(figure: Figure, done: Sequence[Row], space: Mapping[str, Spec]) -> None:
    """Parallel coordinates: an axis a key, a line a trial, coloured by its perplexity.

    Lines that come to one value stand side by side there. The best trial's is on a broad band that
    lies below all of them.
    """
    axes = figure.add_subplot()
    scales = {key: Scale(spec) for key, spec in space.items()}
    colour = colours([row.perplexity or 0.0 for row in done])
    heights = [side_by_side([scale.share(row.values[key]) for row in done])
               for key, scale in scales.items()]  # fmt: skip
    places = range(len(scales))
    for rank, row in enumerate(done):
        y = [height[rank] for height in heights]
        own = colour_of(colour, row.perplexity or 0.0)
        if rank == 0:
            label = f"best: {row.perplexity:,.2f}"
            axes.plot(places, y, color=own, lw=9, alpha=0.25, zorder=1, label=label)
        axes.plot(places, y, color=own, lw=1.4, zorder=2 + 1 / (1 + rank))
    for place, scale in zip(places, scales.values(), strict=True):
        axes.axvline(place, color="#999999", lw=1, zorder=0)
        for at, text in scale.ticks(_FEW_TICKS):
            value = scale.names[int(at)] if scale.names is not None else at
            axes.annotate(text, (place, scale.share(value)), xytext=(6, 0),
                          textcoords="offset points", va="center", fontsize="small", zorder=4,
                          bbox={"fc": "white", "ec": "none", "alpha": 0.7, "pad": 1})  # fmt: skip
    axes.set_xticks(list(places), [_folded(name) for name in short_names(space).values()])
    axes.set_yticks([])
    axes.set_xlim(-0.15, len(scales) - 0.6)
    axes.set_ylim(-0.06, 1.06)
    axes.spines[:].set_visible(False)
    figure.legend(loc="outside lower left", frameon=False, fontsize="small")
    colour_bar(figure, colour, axes)


def _folded(name: str) -> str:
    return name if len(name) <= _WIDTH else name.replace("_", "_\n")


def side_by_side(shares: Sequence[float]) -> list[float]:
    """Heights at which equal ones are a little apart.

    Example:
        >>> side_by_side([0.5, 0.2, 0.5])
        [0.494, 0.2, 0.506]
    """
    heights = []
    for place, share in enumerate(shares):
        same = [other for other, there in enumerate(shares) if abs(there - share) < 1e-9]
        apart = min(_ASIDE, 0.08 / len(same))
        heights.append(round(share + apart * (same.index(place) - (len(same) - 1) / 2), 9))
    return heights


def pairs(figure: Figure, done: Sequence[Row], space: Mapping[str, Spec]) -> None:
    """Each two keys against each other, the trials coloured by perplexity, the best a star."""
    keys, names = list(space), short_names(space)
    scales = {key: Scale(spec) for key, spec in space.items()}
    colour = colours([row.perplexity or 0.0 for row in done])
    grid = figure.subplots(len(keys) - 1, len(keys) - 1, squeeze=False)
    for i, vertical in enumerate(keys[1:]):
        for j, horizontal in enumerate(keys[:-1]):
            axes = grid[i][j]
            if j > i:
                axes.set_visible(False)
                continue
            for rank, row in reversed(list(enumerate(done))):
                axes.plot(
                    scales[horizontal].at(row.values[horizontal]),
                    scales[vertical].at(row.values[vertical]),
                    marker="*" if rank == 0 else "o",
                    ms=17 if rank == 0 else 8,
                    mec="black" if rank == 0 else "white",
                    mew=0.8,
                    color=colour_of(colour, row.perplexity or 0.0),
                    clip_on=False,
                )
            scales[horizontal].label(axes.xaxis, _FEW_TICKS)
            scales[vertical].label(axes.yaxis, _FEW_TICKS)
            axes.spines[["top", "right"]].set_visible(False)
            if i == len(keys) - 2:
                axes.set_xlabel(names[horizontal])
            if j == 0:
                axes.set_ylabel(names[vertical])
    best = done[0].perplexity or 0.0
    star = Line2D([], [], marker="*", ms=14, mec="black", mew=0.8, ls="",
                  color=colour_of(colour, best), label=f"best: {best:,.2f}")  # fmt: skip
    figure.legend(handles=[star], loc="outside lower left", frameon=False, fontsize="small")
    colour_bar(figure, colour, grid.ravel().tolist())
