"""The Dense chains of many_layers.py in PyTorch, with dropout by `torch.nn.utils.parametrize`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from common import measure
from torch.nn import functional as F
from torch.nn.utils import parametrize

SIZES = {"dense16": (100, 16), "dense768": (20, 768)}


class Dropped(torch.nn.Module):
    """A parametrization that drops entries of a weight."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return F.dropout(weight, self.rate, self.training)


def step(name: str, rate: float) -> Callable[[], float]:
    """Returns a training step: forward, backward and SGD."""
    torch.set_num_threads(measure.cores())
    torch.manual_seed(0)
    depth, width = SIZES[name]
    linears = [torch.nn.Linear(width, width) for _ in range(depth)]
    for linear in linears:
        parametrize.register_parametrization(linear, "weight", Dropped(rate))
    model = torch.nn.Sequential(*(m for linear in linears for m in (linear, torch.nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(16, width)

    def run() -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        return loss.item()

    return run
