"""The stack of Dense layers and the LSTM in PyTorch, with dropout and noise as users write it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from common import layer_stacks, measure
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from peers import torch_lm


def _layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, way: str) -> torch.Tensor:
    if "noise" in way or "both" in way:
        weight = weight + layer_stacks.STDDEV * torch.randn_like(weight)
    if "dropout" in way or "both" in way:
        weight = F.dropout(weight, layer_stacks.RATE)
    return F.relu(F.linear(x, weight, bias))


def _step(
    forward: Callable[[], torch.Tensor],
    parameters: Iterable[torch.nn.Parameter],
    dropped_bytes: int,
) -> layer_stacks.Step:
    """Returns a step of SGD. The loss is the mean square of the outputs of `forward`."""
    optimizer = torch.optim.SGD(parameters, layer_stacks.LEARNING_RATE)

    def step() -> float:
        loss = forward().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # frees the gradients before the next step, as TensorFlow does
        return loss.item()

    return layer_stacks.Step(step, dropped_bytes)


def train_step(way: str, width: int = 3072, depth: int = 12, batch: int = 64) -> layer_stacks.Step:
    """Returns a training step of the Dense stack: forward, backward and SGD.

    Args:
        way: "bare", "dropout", "noise" or "both". If it contains "checkpoint", each layer runs
            inside `torch.utils.checkpoint`, so that backward draws again.
        width, depth, batch: As in `layer_stacks.dense`.
    """
    torch.set_num_threads(measure.cores())
    torch.manual_seed(0)
    inputs = torch.from_numpy(layer_stacks.dense(width, depth, batch).inputs().numpy())
    linears = [torch.nn.Linear(width, width) for _ in range(depth)]
    parameters = [p for linear in linears for p in linear.parameters()]
    run = functools.partial(checkpoint, use_reentrant=False) if "checkpoint" in way else None

    def forward() -> torch.Tensor:
        x = inputs
        for linear in linears:
            arguments = (x, linear.weight, linear.bias, way)
            x = run(_layer, *arguments) if run else _layer(*arguments)
        return x

    return _step(forward, parameters, depth * width * width * 4)


def lstm_step(units: int = 512, time: int = 35, batch: int = 20) -> layer_stacks.Step:
    """Returns a training step of one LSTM with dropout on its recurrent weight.

    The sizes are as in `layer_stacks.lstm`.
    """
    torch.set_num_threads(measure.cores())
    torch.manual_seed(0)
    inputs = torch.from_numpy(layer_stacks.lstm(units, time, batch).inputs().numpy()).transpose(
        0, 1
    )
    inputs = inputs.contiguous()
    lstm = torch_lm.WeightDropLSTM(units, units, layer_stacks.RATE)
    zero = torch.zeros(1, batch, units)
    return _step(lambda: lstm(inputs, (zero, zero))[0], lstm.parameters(), 16 * units * units)
