"""Tests of the plot: infinity and zero on logarithmic axes, and many weights."""

import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from tfwd.gradients import moments_plot, statistics


def record(step: int, weights: int = 2, signal: float = 4.0, squares: float = 8.0) -> Any:
    """Returns the record of a batch of 2: V = 2 (squares - mean^2), G = 2 mean^2 - squares."""
    mean = (signal + squares) / 2
    sums = [[value / 10**w for w in range(weights)] for value in (squares, mean, mean)]
    paths = [f"model/layer_{w}/kernel" for w in range(weights)]
    return {"step": step, **statistics.describe(sums, paths, [2] * weights, 2)}


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Draws records, and returns the figure."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path: figures.append(figure) or save(figure, path)
    )

    def drawn(records: list) -> Figure:
        moments_plot.write_plot(records, tmp_path / "plots" / "moments.png")
        assert (tmp_path / "plots" / "moments.png").read_bytes()[:4] == b"\x89PNG"
        return figures[-1]

    return drawn


def marks(axis: Any, marker: str) -> list[tuple[str, list[float], float]]:
    """Returns colour, steps and height (0 to 1 of the panel) of the rows of such marks."""
    return [
        (line.get_color(), list(line.get_xdata()), line.get_ydata()[0])
        for line in axis.lines
        if line.get_marker() == marker
    ]


def test_infinities_are_at_the_upper_edge_and_zeros_at_the_lower_one(draw: Any) -> None:
    figure = draw([record(0), record(5, signal=-1.0), record(10)])
    noise, ratios = figure.axes[1], figure.axes[3]
    ((_, steps, height),) = marks(noise, "^")
    assert steps == [5] and height > 0.95
    assert [steps for _, steps, _ in marks(ratios, "v")] == [[5], [5]]
    heights = [height for *_, height in marks(ratios, "v")]
    assert heights[0] != heights[1] and max(heights) < 0.1
    for axis in (noise, ratios):  # the marks are at both ends of the axis, and cover no point
        points = [v for line in axis.lines if line.get_marker() == "." for v in line.get_ydata()]
        to_height = axis.transData + axis.transAxes.inverted()
        there = [to_height.transform((0, v))[1] for v in points if math.isfinite(v)]
        for *_, height in marks(noise, "^") if axis is noise else marks(ratios, "v"):
            assert all(abs(height - point) > 0.005 for point in there)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["model/layer_0/kernel", "model/layer_1/kernel", "infinite", "zero"]


def test_one_record_is_visible_on_axes_with_ticks(draw: Any) -> None:
    figure = draw([record(7)])
    for axis in figure.axes:
        assert all(line.get_marker() == "." for line in axis.lines)
        shown = [tick for tick in axis.get_xticks() if axis.get_xlim()[0] <= tick]
        assert [tick for tick in shown if tick <= axis.get_xlim()[1]] == [7]
        assert len(axis.get_yticks()) >= 2
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels and all(float(label) > 0 and "$" not in label for label in labels)


def test_of_many_weights_the_largest_are_named(draw: Any) -> None:
    figure = draw([record(step, weights=40) for step in range(3)])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [f"model/layer_{w}/kernel" for w in range(10)] + ["the other 30 weights"]
    for axis in figure.axes[2:]:
        grey = [line for line in axis.lines if line.get_color() == moments_plot.OTHERS]
        assert len(grey) == 30 and not axis.get_legend()


def test_many_records_are_put_together(draw: Any) -> None:
    records = [record(step, signal=4.0 if step % 2 else -2.0) for step in range(500)]
    figure = draw(records)
    (line,) = (line for line in figure.axes[1].lines if line.get_marker() == ".")
    assert len(line.get_xdata()) == math.ceil(500 / 3)
    wanted = statistics.average(records[3:6])["noise_scale"]
    assert list(line.get_ydata())[1] == pytest.approx(wanted)


@pytest.mark.filterwarnings("error")
def test_nothing_to_show(draw: Any) -> None:
    figure = draw([record(step, signal=0.0, squares=0.0) for step in range(3)])
    assert figure.axes[0].texts[0].get_text() == "no finite value above zero"
    assert len(marks(figure.axes[0], "v")) == 2
    with pytest.raises(ValueError, match="at least one record"):
        draw([])
