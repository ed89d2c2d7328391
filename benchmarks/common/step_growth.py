"""Growth of the cost of a training step with a doubled size: sizes, steps, rows and plots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import growth_plots, measure
from common.measure import Row

# For each axis: the model, its fixed sizes, and the values of the size that is doubled.
SWEEPS: dict[str, tuple[str, dict[str, int], list[int]]] = {
    "width": ("dense", {"depth": 2, "batch": 64}, [512, 1024, 2048, 4096]),
    "depth": ("dense", {"width": 1536, "batch": 64}, [1, 2, 4, 8]),
    "batch": ("dense", {"width": 1536, "depth": 2}, [32, 64, 128, 256]),
    "units": ("lstm", {"time": 35, "batch": 20}, [128, 256, 512, 1024]),
    "time": ("lstm", {"units": 512, "batch": 20}, [16, 32, 64, 128]),
}
TITLES = {"dense": "Dense", "lstm": "LSTM"}
LABELS = {"dropout": "tfwd", "naive dropout": "naive", "bare": "without", "PyTorch": "PyTorch"}


def make(axis: str, value: int, way: str) -> Callable[[], Any]:
    """Returns the training step of one point."""
    from common import layer_stacks

    model, fixed, _ = SWEEPS[axis]
    sizes = {**fixed, axis: value}
    if way == "PyTorch":
        from peers import torch_layer_stacks

        return torch_layer_stacks.lstm_step(**sizes)
    return layer_stacks.train_step(getattr(layer_stacks, model)(**sizes), way)


def ways(axis: str, has_torch: bool) -> list[str]:
    """Returns the ways that are compared along an axis."""
    peers = ["PyTorch"] if has_torch and SWEEPS[axis][0] == "lstm" else []
    return ["dropout", "naive dropout", "bare", *peers]


def rows(cost: str, costs: dict[str, dict[str, list[float]]]) -> list[Row]:
    """Returns a row for each axis, with the exponents of tfwd and of the other ways."""
    made = []
    for axis, by_way in costs.items():
        model, _, values = SWEEPS[axis]
        slopes = {way: measure.exponents(values, each) for way, each in by_way.items()}
        ours = slopes.pop("dropout")
        peers = {LABELS[way]: slope.median for way, slope in slopes.items()}
        claim = f"{cost} of a step as {axis} grows, {TITLES[model]}"
        made.append(Row(claim, ours, "exponent", ours.median, peers, ""))
    return made


def draw(
    title: str, unit: str, costs: dict[str, dict[str, list[float]]], folder: str, cost: str
) -> None:
    """Draws a plot for each model, with a panel for each axis.

    Args:
        title: Title of the plots, without the model.
        unit: Unit of the costs.
        costs: dict from an axis and a way to a cost for each value of the axis.
        folder: Folder of the plots, which are `dense_<cost>.png` and `lstm_<cost>.png`.
        cost: End of the file names.
    """
    for model, name in TITLES.items():
        panels = [
            growth_plots.Panel(
                ", ".join(f"{size} {value}" for size, value in SWEEPS[axis][1].items()),
                axis,
                SWEEPS[axis][2],
                {LABELS[way]: each for way, each in by_way.items()},
            )
            for axis, by_way in costs.items()
            if SWEEPS[axis][0] == model
        ]
        growth_plots.draw(f"{title}, {name}", unit, panels, folder, f"{model}_{cost}")


def points(unit: str, costs: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Returns all points of the plots, for the JSON line."""
    return {axis: {"values": SWEEPS[axis][2], unit: cost} for axis, cost in costs.items()}
