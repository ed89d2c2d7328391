"""Largest absolute values of a model's tensors over the steps, and their plot."""

from __future__ import annotations

import importlib
import io
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tfwd.numerics.checked_tensors import Frame

# The largest number of columns that a reader can distinguish.
COLUMNS = 400
ROWS = 60  # largest number of named rows
NOT_FINITE = "#d6006e"


class Magnitudes:
    """Largest absolute values of tensors by step; see `write_plot`.

    With more than 400 steps, neighbouring steps are merged. A merged step has the larger values.
    """

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}  # kinds by label, in the order of computation
        self.steps: list[int] = []
        self.columns: list[dict[str, float]] = []  # infinity for non-finite tensors
        self._together = 1
        self._added = 0

    def add(self, step: int, values: Iterable[tuple[Frame, float]]) -> None:
        """Adds a step. A value that is not finite marks a non-finite tensor."""
        column: dict[str, float] = {}
        for frame, value in values:
            if frame.kind in ("loss scale", "learning rate"):
                continue
            label = frame.label
            self.rows.setdefault(label, frame.kind)
            column[label] = max(value if math.isfinite(value) else math.inf, column.get(label, 0.0))
        if self._added % self._together:
            self._merge(self.columns[-1], column)
        else:
            self.steps.append(step)
            self.columns.append(column)
        self._added += 1
        if len(self.steps) > COLUMNS:
            for one, other in zip(self.columns[::2], self.columns[1::2], strict=False):
                self._merge(one, other)
            self.steps, self.columns = self.steps[::2], self.columns[::2]
            self._together *= 2

    @staticmethod
    def _merge(one: dict[str, float], other: dict[str, float]) -> None:
        for label, value in other.items():
            one[label] = max(value, one.get(label, 0.0))

    def write_plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the tensors of all steps, in the order of computation from top to bottom.

        The color is log10 of the largest absolute value. Non-finite tensors are magenta. Tensors
        whose elements are all 0 are white.

        Args:
            path: path of the file. Its suffix determines the format.
        """
        figure = self._figure()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)

    def png(self) -> bytes:
        """Returns the same plot as the content of a PNG file."""
        buffer = io.BytesIO()
        self._figure().savefig(buffer, format="png", dpi=80)
        return buffer.getvalue()

    def _figure(self) -> Any:
        colours = importlib.import_module("matplotlib.colors")
        maps = importlib.import_module("matplotlib")
        height = min(3.0 + 0.18 * len(self.rows), 14.0)
        # It needs no display. The import is here, because it is slow.
        figure = importlib.import_module("matplotlib.figure").Figure(
            (11, height), layout="constrained"
        )
        axis = figure.subplots()
        labels = list(self.rows)
        grid = [
            [_log10(column.get(label, math.nan)) for column in self.columns] for label in labels
        ]
        shown = [value for row in grid for value in row if math.isfinite(value)]
        low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
        colour = maps.colormaps["viridis"].with_extremes(over=NOT_FINITE, bad="white")
        # Infinity would be drawn like a missing value.
        instead = {-math.inf: math.nan, math.inf: high + 1.0}
        picture = axis.imshow(
            [[instead.get(value, value) for value in row] for row in grid],
            aspect="auto",
            interpolation="nearest",
            cmap=colour,
            norm=colours.Normalize(low, max(high, low + 1e-3)),
        )
        figure.colorbar(picture, label="log10 of the largest absolute value")
        some = max(1, -(-len(labels) // ROWS))
        axis.set_yticks(range(0, len(labels), some), labels[::some], fontsize=7)
        places = range(0, len(self.steps), max(1, -(-len(self.steps) // 12)))
        axis.set_xticks(list(places), [str(self.steps[i]) for i in places])
        axis.set_xlabel("step" if self._together == 1 else f"step ({self._together} per column)")
        axis.set_title("magnitudes" + (", not finite in magenta" if self._any_infinite() else ""))
        return figure

    def _any_infinite(self) -> bool:
        return any(math.isinf(value) for column in self.columns for value in column.values())


def _log10(value: float) -> float:
    if math.isnan(value) or math.isinf(value):
        return value
    return math.log10(value) if value > 0 else -math.inf
