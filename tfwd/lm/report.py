"""What came out of a run: the closing table and the pictures of its curves."""

from __future__ import annotations

import math
import os
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from rich import box
from rich.table import Table

Records = list[dict[str, Any]]

_EPOCH, _STEP = ("train_perplexity", "perplexity"), ("loss", "learning_rate")
TRAIN, VALID, QUIET = "#4477aa", "#cc6677", "#777777"  # told apart by the colour-blind too


def table(summary: dict[str, Any]) -> Table:
    """The closing table.

    Args:
        summary: what `finish` writes to `report/summary.json`. Used here: "texts" (by name:
            "perplexity", "bits", "tokens") and "level".

    Returns:
        A table for a rich console.

    Example:
        >>> texts = {"test": {"perplexity": 8.0, "bits": 3.0, "tokens": 1000}}
        >>> [column.header for column in table({"texts": texts, "level": "char"}).columns]
        ['text', 'perplexity', 'bits per character', 'tokens']
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("text")
    unit = "character" if summary["level"] == "char" else "word"
    for name in ("perplexity", f"bits per {unit}", "tokens"):
        made.add_column(name, justify="right")
    for name, found in summary["texts"].items():
        made.add_row(
            name, _number(found["perplexity"]), _number(found["bits"], 3), f"{found['tokens']:,}"
        )
    return made


def facts(summary: dict[str, Any]) -> str:
    """The line under the table."""
    speed = summary["tokens_per_second"]
    parts = [
        f"weights of epoch {summary['best_epoch']} of {summary['epochs']}",
        f"{summary['parameters']:,} parameters",
        f"vocabulary of {summary['vocabulary']:,}",
    ]
    if speed:
        parts.append(f"{speed:,.0f} tokens a second in training")
    return ", ".join(parts)


def curves(records: Records, path: str | os.PathLike[str], title: str = "") -> None:
    """Draws the learning curves: perplexity by epoch, and loss and learning rate by step.

    Args:
        records: the run's log, as `metrics.read_metrics` returns it.
        path: the PNG file.
        title: above the picture.
    """
    epochs = [r for r in records if r["kind"] == "valid" and _has(r, "epoch", *_EPOCH)]
    steps = [r for r in records if r["kind"] == "train" and _has(r, *_STEP)]
    figure = Figure(figsize=(9, 7), dpi=120, layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[3, 2])
    _perplexities(figure.add_subplot(grid[0, :]), epochs)
    _by_step(figure.add_subplot(grid[1, 0]), steps, "loss", "training loss, nats a token")
    rates = figure.add_subplot(grid[1, 1])
    _by_step(rates, steps, "learning_rate", "learning rate")
    rates.set_ylim(bottom=0)
    if title:
        figure.suptitle(title)
    figure.savefig(path)


def _has(record: dict[str, Any], *names: str) -> bool:
    """Whether a record has numbers of these names; a log may hold others."""
    return all(isinstance(record.get(n, ""), (int, float, type(None))) for n in names)


def _perplexities(axes: Axes, epochs: Records) -> None:
    numbers = [r["epoch"] for r in epochs]
    train = [_value(r["train_perplexity"]) for r in epochs]
    valid = [_value(r["perplexity"]) for r in epochs]
    axes.plot(numbers, train, color=TRAIN, marker="o", ms=3.5, label="train, as it trained")
    axes.plot(numbers, valid, color=VALID, marker="o", ms=3.5, label="valid")
    best = [r for r in epochs if r.get("best")]
    if best:
        x, y = best[-1]["epoch"], best[-1]["perplexity"]
        label = f"best: {_number(y)} after epoch {x}"
        axes.plot([x], [y], color=VALID, marker="*", ms=15, ls="", label=label, clip_on=False)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("epoch")
    axes.set_ylabel("perplexity")
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


def _number(value: float | None, digits: int = 2) -> str:
    return "not finite" if value is None else f"{value:,.{digits}f}"
