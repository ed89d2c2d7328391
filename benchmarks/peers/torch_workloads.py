"""The stack of Dense layers, and the LSTM, in PyTorch, perturbed as PyTorch's users do it."""

from __future__ import annotations

import functools

import measure
import torch
import torch_lm
import workloads
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def _layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, way: str) -> torch.Tensor:
    if "noise" in way or "both" in way:
        weight = weight + workloads.STDDEV * torch.randn_like(weight)
    if "dropout" in way or "both" in way:
        weight = F.dropout(weight, workloads.RATE)
    return F.relu(F.linear(x, weight, bias))


def train_step(way: str, width: int = 3072, depth: int = 12, batch: int = 64) -> workloads.Step:
    """A training step of the Dense stack: forward, backward and SGD.

    Args:
        way: "bare", "dropout", "noise" or "both"; with "checkpoint" in it, each layer runs inside
            `torch.utils.checkpoint`, so that backward draws again.
        width, depth, batch: as in `workloads.dense`.
    """
    torch.set_num_threads(measure.cores())
    torch.manual_seed(0)
    inputs = torch.from_numpy(workloads.dense(width, depth, batch).inputs().numpy())
    linears = [torch.nn.Linear(width, width) for _ in range(depth)]
    parameters = [p for linear in linears for p in linear.parameters()]
    optimizer = torch.optim.SGD(parameters, workloads.LEARNING_RATE)
    run = functools.partial(checkpoint, use_reentrant=False) if "checkpoint" in way else None

    def step() -> float:
        x = inputs
        for linear in linears:
            arguments = (x, linear.weight, linear.bias, way)
            x = run(_layer, *arguments) if run else _layer(*arguments)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # no gradient is left when the next step begins, as in TensorFlow
        return loss.item()

    return workloads.Step(step, depth * width * width * 4)


def lstm_step(units: int = 512, time: int = 35, batch: int = 20) -> workloads.Step:
    """A training step of one LSTM with dropout on its recurrent weight, as `workloads.lstm`."""
    torch.set_num_threads(measure.cores())
    torch.manual_seed(0)
    inputs = torch.from_numpy(workloads.lstm(units, time, batch).inputs().numpy()).transpose(0, 1)
    inputs = inputs.contiguous()
    lstm = torch_lm.WeightDropLSTM(units, units, workloads.RATE)
    optimizer = torch.optim.SGD(lstm.parameters(), workloads.LEARNING_RATE)
    zero = torch.zeros(1, batch, units)

    def step() -> float:
        outputs, _ = lstm(inputs, (zero, zero))
        loss = outputs.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return workloads.Step(step, 16 * units * units)
