"""Draws the learning curves of a run from its metrics."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)

from tfwd.runs.interfaces import Score

Records = list[dict[str, Any]]

_STEP = ("loss", "learning_rate")
TRAIN, VALID, QUIET = "#4477aa", "#cc6677", "#777777"  # distinguishable for colour-blind people


def curves(
    records: Records,
    path: str | os.PathLike[str],
    score: Score,
    title: str = "",
    shares: Mapping[str, str] | None = None,
) -> None:
    """Draws the learning curves: the score by epoch, and loss and learning rate by step.

    Args:
        records: the run's records, from `metrics.read_metrics`.
        path: path of the PNG file.
        score: how losses are shown.
        title: str. The title above the picture.
        shares: dict from the name of a number in the records to its label. The numbers are from 0
            to 1. They are drawn beside the score.
    """
    names = (f"train_{score.name}", score.name)
    epochs = [r for r in records if r["kind"] == "valid" and _has(r, "epoch", *names)]
    steps = [r for r in records if r["kind"] == "train" and _has(r, *_STEP)]
    figure = Figure(figsize=(9, 7), dpi=120, layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[3, 2])
    if shares:
        _by_epoch(figure.add_subplot(grid[0, 0]), epochs, score.name)
        _shares(figure.add_subplot(grid[0, 1]), epochs, shares)
    else:
        _by_epoch(figure.add_subplot(grid[0, :]), epochs, score.name)
    unit = "" if score.name == "loss" else f", nats per {score.unit}"
    _by_step(figure.add_subplot(grid[1, 0]), steps, "loss", f"training loss{unit}")
    rates = figure.add_subplot(grid[1, 1])
    _by_step(rates, steps, "learning_rate", "learning rate")
    rates.set_ylim(bottom=0)
    if title:
        figure.suptitle(title)
    figure.savefig(path)


def _has(record: dict[str, Any], *names: str) -> bool:
    """Returns True if the record has numbers with these names.

    A record of another program may lack them.
    """
    return all(isinstance(record.get(n, ""), (int, float, type(None))) for n in names)


def _by_epoch(axes: Axes, epochs: Records, score: str) -> None:
    numbers = [r["epoch"] for r in epochs]
    train = [_value(r[f"train_{score}"]) for r in epochs]
    valid = [_value(r[score]) for r in epochs]
    axes.plot(numbers, train, color=TRAIN, marker="o", ms=3.5, label="train, during training")
    axes.plot(numbers, valid, color=VALID, marker="o", ms=3.5, label="valid")
    best = [r for r in epochs if r.get("best")]
    if best:
        x, y = best[-1]["epoch"], best[-1][score]
        label = f"best: {number_text(y)} after epoch {x}"
        axes.plot([x], [y], color=VALID, marker="*", ms=15, ls="", label=label, clip_on=False)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("epoch")
    axes.set_ylabel(score)
    _plain(axes)
    if epochs:
        axes.legend(frameon=False)


def _shares(axes: Axes, epochs: Records, shares: Mapping[str, str]) -> None:
    for (name, label), color in zip(shares.items(), (VALID, TRAIN, QUIET), strict=False):
        found = [(r["epoch"], r[name]) for r in epochs if _has(r, name)]
        x, y = [epoch for epoch, _ in found], [_value(value) for _, value in found]
        axes.plot(x, y, color=color, marker="o", ms=3.5, label=f"valid {label}")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("epoch")
    _plain(axes)
    if epochs:
        axes.legend(frameon=False)


def _by_step(axes: Axes, steps: Records, name: str, label: str) -> None:
    x = [r["step"] for r in steps]
    y = [_value(r[name]) for r in steps]
    axes.plot(x, y, color=TRAIN if name == "loss" else QUIET, lw=1.2)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="y", color="#dddddd", lw=0.8)
    axes.set_axisbelow(True)


def _value(number: float | None) -> float:
    return math.nan if number is None else number


def number_text(value: float | None, digits: int = 2) -> str:
    """Returns a number as text. `None` is a non-finite number, which JSON cannot store."""
    return "not finite" if value is None else f"{value:,.{digits}f}"
