"""Models of finite_check_cost.py in PyTorch, and PyTorch's checks for NaN.

bare                       no check
detect_anomaly             `torch.autograd.set_detect_anomaly(True)`
DebugUnderflowOverflow     hooks on every module, by Hugging Face's transformers
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable

import torch
from common import measure
from common.finite_check_settings import (
    ANOMALY,
    BARE,
    BLOCK,
    CLASSES,
    FILTERS,
    HEADS,
    LEARNING_RATE,
    LSTM,
    MLP,
    SHAPES,
    STACK,
    UNDERFLOW,
    UNITS,
    WIDE,
    Side,
    data,
    depth,
    steps,
)
from torch import nn


class _Last(nn.Module):
    """An LSTM that returns its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(SHAPES[LSTM][2], UNITS, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0][:, -1]


class _Block(nn.Module):
    """A transformer block with normalization before attention and before the two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        width = SHAPES[BLOCK][2]
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(width, WIDE), nn.GELU(), nn.Linear(WIDE, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return (x + self.wide(self.second(x))).mean(dim=1)


def model(name: str) -> nn.Module:
    """Returns one of the models, with the same weights each time."""
    torch.manual_seed(0)
    if name in (MLP, STACK):
        width = SHAPES[name][1]
        dense = [part for _ in range(depth(name)) for part in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*dense, nn.Linear(width, CLASSES))
    if name == LSTM:
        return nn.Sequential(_Last(), nn.Linear(UNITS, CLASSES))
    if name == BLOCK:
        return nn.Sequential(_Block(), nn.Linear(SHAPES[name][2], CLASSES))
    _, side, _, channels = SHAPES[name]
    layers: list[nn.Module] = []
    for before, filters in zip((channels, *FILTERS), FILTERS, strict=False):
        layers += [nn.Conv2d(before, filters, 3, padding="same"), nn.ReLU()]
        layers += [nn.BatchNorm2d(filters), nn.MaxPool2d(2)]
    flat = (side >> len(FILTERS)) ** 2 * FILTERS[-1]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, CLASSES))


def side(name: str, way: str) -> Side:
    """Returns a model in one way.

    Raises:
        ImportError: If `way` needs transformers, and transformers is not installed.
    """
    torch.set_num_threads(measure.cores())
    trained = model(name)
    inputs, labels = (torch.from_numpy(array) for array in data(name))
    if inputs.ndim == 4:  # PyTorch has channels first
        inputs = inputs.permute(0, 3, 1, 2).contiguous()
    optimizer = torch.optim.Adam(trained.parameters(), LEARNING_RATE)
    if way == UNDERFLOW:
        from transformers.debug_utils import DebugUnderflowOverflow

        DebugUnderflowOverflow(trained)

    def step() -> float:
        for _ in range(steps(name)):
            with torch.autograd.set_detect_anomaly(way == ANOMALY):
                loss = nn.functional.cross_entropy(trained(inputs), labels)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    step()
    return Side(step, lambda: _reaction_to_nan(trained, step))


def _reaction_to_nan(trained: nn.Module, step: Callable[[], float]) -> str:
    weights = list(trained.parameters())
    with torch.no_grad():
        weights[-2].view(-1)[0] = float("nan")
    before = [weight.detach().clone() for weight in weights]
    try:
        # Both checks print long descriptions of the position.
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step()
    except (RuntimeError, ValueError):
        said = "raises"
    else:
        said = "passes"
    same = all(
        torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in zip(before, weights, strict=True)
    )
    return said if same else f"{said}, weights are overwritten"


def sides(name: str) -> dict[str, Side]:
    """Returns a dict from a way to its side, without sides that are not installed."""
    ways = (BARE, ANOMALY, UNDERFLOW)
    found = {way: measure.attempt(lambda way=way: side(name, way), way) for way in ways}
    return {way: one for way, one in found.items() if one is not None}
