"""What came of the runs of `fine_tuning.py`: a table in Markdown, and a plot of all seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import runs


class Row(NamedTuple):
    """A way's runs at one rate."""

    way: str
    rate: float
    valid: list[float]
    test: dict[int, float]  # by the seed
    failed: int


def change(row: Row, plain: Row) -> tuple[float, float | None]:
    """The mean difference to the plain way with the same seeds, and its standard error."""
    pairs = [row.test[seed] - plain.test[seed] for seed in row.test if seed in plain.test]
    error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
    return statistics.mean(pairs), error


def table(found: list[Row]) -> str:
    """The rows in Markdown."""
    heads = ["way", "rate", "seeds", "valid", "test, mean ± deviation", "worst", "failed"]
    lines = [f"| {' | '.join([*heads, 'against plain'])} |", "|---" * (len(heads) + 1) + "|"]
    for row in found:
        test = list(row.test.values())
        spread = f" ± {statistics.stdev(test):.2f}" if len(test) > 1 else ""
        mean, error = change(row, found[0])
        against = f"{mean:+.2f}" + (f" ± {error:.2f}" if error is not None else "")
        lines.append(
            f"| {row.way} | {row.rate:g} | {len(test)} | {statistics.mean(row.valid):.1f} "
            f"| {statistics.mean(test):.2f}{spread} | {min(test):.1f} | {row.failed} "
            f"| {'' if row is found[0] else against} |"
        )
    return "\n".join(lines)


def plot(found: Mapping[str, Sequence[list[Row]]], path: Path) -> None:
    """The test accuracy of every seed: a column a way, a panel a case."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        len(found), 1, figsize=(8, 0.4 + 3.0 * len(found)), squeeze=False, sharex=False
    )
    for axes, (case, both) in zip(panels[:, 0], found.items(), strict=True):
        for shift, colour, label, of_rate in zip(
            (-0.15, 0.15), runs.COLOURS[1:], ("common rate", "each way's best"), both, strict=False
        ):
            for place, row in enumerate(of_rate):
                test = list(row.test.values())
                axes.scatter([place + shift] * len(test), test, s=14, color=colour, alpha=0.5)
                ends = place + shift - 0.12, place + shift + 0.12
                axes.hlines(statistics.mean(test), *ends, color=colour, lw=2)
            axes.scatter([], [], s=14, color=colour, label=label)
        names = [row.way for row in both[0]]
        axes.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
        axes.set(title=case, ylabel="test accuracy, %")
        axes.axhline(
            statistics.mean(both[0][0].test.values()), color=runs.COLOURS[0], lw=0.8, ls="--"
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    panels[0, 0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
