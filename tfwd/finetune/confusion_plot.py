"""Plots the confusion matrix of a classifier as a PNG file."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

_WRITTEN = 30  # maximum number of classes with written counts; more would be unreadable


def draw(
    table: np.ndarray, labels: Sequence[str], path: str | os.PathLike[str], title: str = ""
) -> None:
    """Draws the counts of predicted labels for each true label.

    The colour is the share of the true label. The number is the count.

    Args:
        table: the counts, from `scores.confusion`.
        labels: the names of the classes.
        path: path of the PNG file.
        title: str. The title above the picture.
    """
    count = len(labels)
    side = 2.4 + min(max(0.55 * count, 2.5), 14)
    figure = Figure(figsize=(side + 0.8, side), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    shares = table / np.maximum(table.sum(1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    names = [label if len(label) <= 18 else f"{label[:17]}…" for label in labels]
    axes.set_xticks(range(count), names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(count), names)
    axes.set_xlabel("predicted label")
    axes.set_ylabel("true label")
    axes.spines[:].set_visible(False)
    if count <= _WRITTEN:
        for row in range(count):
            for column in range(count):
                color = "white" if shares[row, column] > 0.55 else "#222222"
                number = f"{table[row, column]:,}"
                axes.text(column, row, number, ha="center", va="center", color=color, fontsize=8)
    bar = figure.colorbar(image, shrink=0.8)
    bar.set_label("share of the true label")
    bar.outline.set_visible(False)
    if title:
        axes.set_title(title)
    figure.savefig(path)
