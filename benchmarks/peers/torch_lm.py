"""The language model of `tfwd.lm` and its training step, as PyTorch's users write them.

It follows the program of the AWD-LSTM's authors. A dropped weight replaces the recurrent weight of
each `torch.nn.LSTM` before each call. Whole embedding rows are dropped. Dropout between the layers
has one mask for all time steps. The softmax is tied to the embedding. The time axis comes first.
There is one difference from `tfwd.lm`: an LSTM of PyTorch has two biases, which are added.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import ml_collections
import numpy as np
import torch
from common import measure
from torch.nn import functional as F

State = list[tuple[torch.Tensor, torch.Tensor]]


def locked(x: torch.Tensor, rate: float) -> torch.Tensor:
    """Returns dropout of `[time, batch, units]` with one mask for all time steps."""
    if not rate:
        return x
    return x * x.new_empty(1, *x.shape[1:]).bernoulli_(1 - rate).div_(1 - rate)


class WeightDropLSTM(torch.nn.Module):
    """A `torch.nn.LSTM` of one layer with dropout on `weight_hh`."""

    def __init__(self, inputs: int, units: int, rate: float) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(inputs, units)
        self.rate = rate
        raw = self.lstm.weight_hh_l0
        del self.lstm._parameters["weight_hh_l0"]
        self.raw = torch.nn.Parameter(raw.data)

    def forward(
        self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        # The module passes the tensor with this name to its LSTM kernel.
        self.lstm.weight_hh_l0 = F.dropout(self.raw, self.rate, self.training)
        return self.lstm(x, state)


class LanguageModel(torch.nn.Module):
    """Embedding, LSTMs and tied softmax with the rates of a `tfwd.lm` configuration."""

    def __init__(self, model: ml_collections.ConfigDict, words: int) -> None:
        super().__init__()
        self.config = model
        self.embedding = torch.nn.Parameter(
            torch.empty(words, model.embedding_dim).uniform_(-model.init_scale, model.init_scale)
        )
        widths = [model.embedding_dim, *model.hidden_units]
        self.lstms = torch.nn.ModuleList(
            WeightDropLSTM(inputs, units, model.weight_dropout)
            for inputs, units in itertools.pairwise(widths)
        )
        self.bias = torch.nn.Parameter(torch.zeros(words))

    def forward(
        self, ids: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, State, torch.Tensor, torch.Tensor]:
        """Returns logits, states, the last LSTM's output, and this output after dropout."""
        config, keep = self.config, 1 - self.config.embedding_dropout
        rows = self.embedding.new_empty(len(self.embedding), 1).bernoulli_(keep).div_(keep)
        x = locked(F.embedding(ids, self.embedding * rows), config.input_dropout)
        carried = []
        for number, lstm in enumerate(self.lstms):
            x, last = lstm(x, state[number])
            carried.append((last[0].detach(), last[1].detach()))
            if number < len(self.lstms) - 1:
                x = locked(x, config.hidden_dropout)
        dropped = locked(x, config.output_dropout)
        return F.linear(dropped, self.embedding, self.bias), carried, x, dropped


def train_step(
    config: ml_collections.ConfigDict, words: int
) -> tuple[Callable[[np.ndarray, np.ndarray], float], int]:
    """Returns a function `step(inputs, targets)`, and the number of weights.

    Inputs and targets are `[batch, time]`. The function returns the loss in nats per token.
    """
    torch.set_num_threads(measure.cores())
    torch.manual_seed(config.seed)
    model = LanguageModel(config.model, words)
    optimizer: torch.optim.Optimizer
    if config.optimizer.name == "sgd":
        optimizer = torch.optim.SGD(
            model.parameters(),
            config.optimizer.learning_rate,
            weight_decay=config.optimizer.weight_decay,
        )
    else:
        optimizer = torch.optim.Adam(model.parameters(), config.optimizer.learning_rate)
    batch = config.data.batch_size
    state: State = [
        (torch.zeros(1, batch, units), torch.zeros(1, batch, units))
        for units in config.model.hidden_units
    ]

    def step(inputs: np.ndarray, targets: np.ndarray) -> float:
        nonlocal state
        optimizer.zero_grad()
        ids, wanted = (torch.from_numpy(a.T.astype(np.int64)) for a in (inputs, targets))
        logits, state, raw, dropped = model(ids, state)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        objective = loss
        objective = objective + config.model.activation_regularization * dropped.square().mean()
        slow = (raw[1:] - raw[:-1]).square().mean()
        objective = objective + config.model.temporal_activation_regularization * slow
        objective.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        return loss.item()

    return step, sum(p.numel() for p in model.parameters())
