"""Moments of per-example gradients in PyTorch, as its users compute them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import measure
from torch import nn

# Libraries that store every example's gradient are skipped if these gradients are larger.
MOST_BYTES = 1 << 30


class Pool(nn.Module):
    """The mean over an image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


class Last(nn.Module):
    """The last output of an LSTM."""

    def forward(self, x: tuple[torch.Tensor, Any]) -> torch.Tensor:
        return x[0][:, -1]


def dense(widths: list[int]) -> list[nn.Module]:
    """Returns linear layers with relu, and ten classes."""
    stack: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        stack += [nn.Linear(a, b), nn.ReLU()]
    return [*stack, nn.Linear(widths[-1], 10)]


def convolutions() -> list[nn.Module]:
    """Returns two convolutions, and ten classes."""
    first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
    return [first, nn.ReLU(), second, nn.ReLU(), Pool(), nn.Linear(64, 10)]


# The layers of `gradient_moments_cases.CASES`, except the tied model.
MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "mlp": lambda: dense([784, 512, 512]),
    "wide": lambda: dense([1024] * 5),
    "sequence": lambda: dense([128, 256, 256]),
    "conv": convolutions,
    "embedding": lambda: [nn.Embedding(2000, 64), nn.Linear(64, 10)],
    "lstm": lambda: [nn.LSTM(64, 128, batch_first=True), Last(), nn.Linear(128, 10)],
}


def model(name: str) -> nn.Sequential:
    """Returns a model of `MODELS`, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(*MODELS[name]())


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross entropy over all positions."""
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


def both(samples: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns both moments of gradients that are stored example by example."""
    return [(g.mean(0), (g * g).mean(0)) for g in samples]


def by_vmap(name: str, x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    """Returns a run of `torch.func.vmap` of `torch.func.grad`."""
    net = model(name)
    parameters = {k: v.detach() for k, v in net.named_parameters()}

    def single(p: Any, one: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return cross_entropy(torch.func.functional_call(net, p, (one[None],)), wanted[None])

    each = torch.func.vmap(torch.func.grad(single), in_dims=(None, 0, 0))
    return lambda: both(each(parameters, x, y).values())


def by_backpack(name: str, x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    """Returns a run of BackPACK's `SumGradSquared`."""
    from backpack import backpack, extend
    from backpack.extensions import SumGradSquared

    net, loss = extend(model(name)), extend(nn.CrossEntropyLoss())

    def run() -> None:
        out = net(x)
        if out.dim() > 2:
            raise NotImplementedError(
                f"BackPACK's cross entropy expects [batch, classes], got rank {out.dim()}"
            )
        with backpack(SumGradSquared()):
            loss(out, y).backward()

    return run


def by_opacus(name: str, x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    """Returns a run of Opacus's `GradSampleModule`."""
    from opacus import GradSampleModule

    watched = GradSampleModule(model(name))

    def run() -> Any:
        watched.zero_grad()
        cross_entropy(watched(x), y).backward()
        return both(p.grad_sample for p in watched.parameters())

    return run


HOLDING = {"PyTorch vmap": by_vmap, "Opacus": by_opacus}


def runs(name: str, x: np.ndarray, y: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Returns a run of a plain gradient, `plain`, and a run of both moments for each library.

    A library that is not installed has no run.
    """
    torch.set_num_threads(measure.cores())
    if name == "conv":
        x = x.transpose(0, 3, 1, 2).copy()
    given, target = torch.from_numpy(x), torch.from_numpy(y).long()
    given = given.long() if x.dtype.kind == "i" else given
    net = model(name)

    def plain() -> None:
        net.zero_grad()
        cross_entropy(net(given), target).backward()

    made: dict[str, Any] = {"plain": plain}
    makers = {"BackPACK": by_backpack}
    if 4 * len(x) * sum(p.numel() for p in net.parameters()) <= MOST_BYTES:
        makers |= HOLDING
    for peer, make in makers.items():
        made[peer] = measure.attempt(lambda make=make: make(name, given, target), peer)
    return {peer: run for peer, run in made.items() if run is not None}
