"""Axes of the pictures: where values stand, few round ticks, and colours for perplexities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from tfwd.lm.keys import shown
from tfwd.tuning.space import Choice, Int, Spec

MOST_TICKS = 8
_MARGIN = 0.04
_TOLD_APART = 0.03  # of the axis: choices nearer than that are shown one by one, as texts are
_COLOURS = colormaps["viridis"]
_PERPLEXITY = "validation perplexity"


class Scale:
    """Where a key's values stand on an axis: numbers at themselves, other choices one by one.

    Numbers that a straight axis would heap up, as 0.01, 1 and 1e30, are shown one by one too.

    Args:
        spec: the key's declaration.
    """

    def __init__(self, spec: Spec):
        self.spec = spec
        self.log = bool(getattr(spec, "log", False))
        self.names: list[str] | None = None
        if isinstance(spec, Choice) and not spec.numbers:
            self.names = [shown(value) for value in spec.values]
        elif isinstance(spec, Choice) and _heaped(sorted(spec.values)):
            self.names = [shown(value) for value in sorted(spec.values)]

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest place."""
        places = [self.at(end) for end in self.spec.ends]
        return min(places), max(places)

    def at(self, value: Any) -> float:
        """The place of a value, in the axis's own units."""
        return float(self.names.index(shown(value)) if self.names is not None else value)

    def share(self, value: Any) -> float:
        """The place of a value between the lowest, 0, and the highest, 1."""
        return self._share(self.at(value))

    def _share(self, place: float) -> float:
        low, high = self.ends
        if self.log:
            low, high, place = math.log(low), math.log(high), math.log(place)
        return 0.5 if low == high else (place - low) / (high - low)

    def ticks(self, most: int = MOST_TICKS) -> list[tuple[float, str]]:
        """Places and texts of the ticks: values that can occur, where only some can.

        Args:
            most: at most so many, but of texts all.
        """
        if self.names is not None:
            return list(enumerate(self.names))
        low, high = self.ends
        counted = self.spec.values
        if isinstance(self.spec, Int) and self.spec.step == 1 and high - low >= most:
            counted = None  # all whole numbers are as good
        if counted is not None:
            places = self._thinned(sorted(map(self.at, counted)), most)
        elif self.log:
            places = log_ticks(low, high, most)
        else:
            places = round_ticks(low, high, most, isinstance(self.spec, Int))
        return [(place, f"{place:.6g}") for place in places]

    def _thinned(self, places: Sequence[float], most: int) -> list[float]:
        if not isinstance(self.spec, Choice):  # they are evenly apart
            return list(places[:: math.ceil(len(places) / most)])
        kept: list[float] = []
        for place in places:
            if not kept or self._share(place) - self._share(kept[-1]) > 0.9 / most:
                kept.append(place)
        return kept

    def label(self, axis: Any, most: int = MOST_TICKS) -> None:
        """Sets an x or y axis up: the whole range of the key, with its ticks."""
        low, high = self.ends
        across = axis.axis_name == "x"
        if self.log:
            (axis.axes.set_xscale if across else axis.axes.set_yscale)("log")
            margin = (high / low) ** _MARGIN if high > low else 2.0
            limits = low / margin, high * margin
        else:
            margin = (high - low) * _MARGIN or 0.5
            margin = max(margin, 0.3) if self.names is not None else margin
            limits = low - margin, high + margin
        (axis.axes.set_xlim if across else axis.axes.set_ylim)(*limits)
        found = self.ticks(most)
        axis.set_ticks([place for place, _ in found], [text for _, text in found])
        axis.set_minor_locator(NullLocator())


def _heaped(values: Sequence[float]) -> bool:
    gaps = np.diff(np.array(values, float))
    return bool(len(gaps) and gaps.min() < _TOLD_APART * (values[-1] - values[0]))


def round_ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Round numbers in [low, high], evenly apart.

    Example:
        >>> round_ticks(16.27, 16.91, 5)
        [16.4, 16.6, 16.8]
    """
    found = MaxNLocator(most, steps=[1, 2, 5, 10], integer=whole).tick_values(low, high)
    slack = 1e-9 * (high - low)
    return [float(f"{tick:.9g}") for tick in found if low - slack <= tick <= high + slack]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers in [low, high] for a logarithmic axis, at most `most`.

    Example:
        >>> log_ticks(1e-4, 1e-1, 5)
        [0.0001, 0.001, 0.01, 0.1]
        >>> log_ticks(20, 700, 6)
        [20.0, 50.0, 100.0, 200.0, 500.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for leading in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        every = [float(f"{d}e{power}") for power in range(first, last + 1) for d in leading]
        found = [tick for tick in every if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(found) <= most:
            break
    found = found[:: math.ceil(len(found) / most)] if found else found
    return found if len(found) > 1 else round_ticks(low, high, most - 1)


def colours(values: Sequence[float]) -> ScalarMappable:
    """Colours from the lowest to the highest perplexity; of one value alone, one colour."""
    low, high = min(values), max(values)
    return ScalarMappable(LogNorm(low, high) if high > low else None, _COLOURS)


def colour_of(mappable: ScalarMappable, value: float) -> Any:
    """The colour of a perplexity."""
    return mappable.to_rgba(np.array(value)) if _ranges(mappable) else _COLOURS(0.25)


def colour_bar(figure: Figure, mappable: ScalarMappable, axes: Any) -> None:
    """Draws the bar, with round numbers; none if there is only one perplexity."""
    if not _ranges(mappable):
        return
    bar = figure.colorbar(mappable, ax=axes, label=_PERPLEXITY, pad=0.02, aspect=35, fraction=0.05)
    low, high = mappable.get_clim()
    ticks = perplexity_ticks(low, high)
    bar.set_ticks(ticks, labels=[f"{tick:,.6g}" for tick in ticks])
    bar.ax.minorticks_off()


def _ranges(mappable: ScalarMappable) -> bool:
    return isinstance(mappable.norm, LogNorm)


def perplexity_axis(axes: Any, values: Sequence[float]) -> None:
    """The vertical axis: logarithmic if the perplexities differ by more than three times."""
    low, high = min(values), max(values)
    if high > 3 * low:
        axes.set_yscale("log")
        margin = (high / low) ** 0.06
        bottom, top = low / margin, high * margin
    else:
        margin = 0.06 * (high - low) or 0.02 * high
        bottom, top = low - margin, high + margin
    axes.set_ylim(bottom, top)
    ticks = perplexity_ticks(bottom, top) if high > low else [round(low, 2)]
    axes.set_yticks(ticks, [f"{tick:,.6g}" for tick in ticks])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel(_PERPLEXITY)


def perplexity_ticks(low: float, high: float) -> list[float]:
    """Round perplexities."""
    choose = log_ticks if high > 3 * low else round_ticks
    return choose(low, high, MOST_TICKS)
