"""Runs of the fine-tuning experiment, their order, and the selection by the validation texts.

A run is identified by the fields of `Run`. Every selection depends only on the finished runs.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

TASKS = ("trec", "sst2")
EXAMPLES, VALID, TEST = 300, 300, 500  # numbers of training, validation and test texts
EPOCHS, BATCH, WARMUP, CLIP = 5, 16, 0.1, 1.0
LENGTH = 48  # largest number of tokens; 2 % of the texts of SST-2 are cut, and no text of TREC
RATES = (5e-5, 1e-4, 2e-4, 4e-4)
FACTORS = (1.0, 2.0)  # each method also tries twice the common learning rate
SELECT_SEEDS = (100, 101)  # the results have other seeds
SEEDS, PEER_SEEDS = 5, 2

# The strengths that each method tries.
METHODS: dict[str, tuple[float, ...]] = {
    "plain": (0.0,),
    "dropout": (0.1, 0.2),
    "weight dropout": (0.05, 0.2),
    "Mixout 0.7": (0.7,),
    "Mixout 0.9": (0.9,),
    "decay towards the start": (30.0, 300.0),
    "noise by deviation": (0.05, 0.15),
}

Lines = Mapping["Run", Mapping[str, Any]]


class Run(NamedTuple):
    """One fine-tuning.

    Attributes:
        kind: "select" or "final". A "select" run is evaluated on the validation texts. A "final"
            run is also evaluated on the test texts.
        peer: "tfwd" or "pytorch".
        task: A name in `TASKS`.
        method: A name in `METHODS`.
        strength: Drop rate, decay, or noise in standard deviations of the weight.
        rate: Highest learning rate of the schedule.
        seed: Seed of the head, of the order of the texts and of all draws.
    """

    kind: str
    peer: str
    task: str
    method: str
    strength: float
    rate: float
    seed: int


class Choice(NamedTuple):
    """The settings that the validation texts of a task select.

    Attributes:
        common: Learning rate of the plain method.
        settings: dict from a method to its strength and learning rate.
    """

    common: float
    settings: dict[str, tuple[float, float]]


def select(task: str, method: str, strength: float, rate: float) -> list[Run]:
    """Returns the selection runs of one setting."""
    return [Run("select", "tfwd", task, method, strength, rate, seed) for seed in SELECT_SEEDS]


def valid_loss(lines: Lines, runs: Iterable[Run]) -> float:
    """Returns the mean validation loss. It is infinite if a run is missing or diverged."""
    losses = [lines[run]["valid_loss"] if run in lines else None for run in runs]
    known = [loss for loss in losses if loss is not None]
    return statistics.mean(known) if len(known) == len(losses) else math.inf


def choose(lines: Lines, task: str) -> Choice:
    """Returns the settings with the lowest mean validation loss, or the first if none is known.

    1. The common learning rate is the best one of the plain method.
    2. The strength of a method is its best one at the common rate.
    3. The learning rate of a method is its best one at that strength.
    """
    common = min(RATES, key=lambda rate: valid_loss(lines, select(task, "plain", 0.0, rate)))
    settings = {"plain": (0.0, common)}
    for method in list(METHODS)[1:]:

        def loss(strength: float, rate: float, method: str = method) -> float:
            return valid_loss(lines, select(task, method, strength, rate))

        strength = min(METHODS[method], key=lambda one: loss(one, common))
        settings[method] = strength, min(rates(common), key=lambda one: loss(strength, one))
    return Choice(common, settings)


def rates(common: float) -> list[float]:
    """Returns the learning rates that every method except the plain one tries."""
    return [factor * common for factor in FACTORS]


def plan(lines: Lines, seeds: int = SEEDS) -> list[Run]:
    """Returns all runs in their order: the selection, then seed 0 of all methods, then seed 1.

    The settings of later runs depend on earlier runs. So call it again after each run.
    """
    chosen = {task: choose(lines, task) for task in TASKS}
    runs: list[Run] = []
    for task, rate in itertools.product(TASKS, RATES):
        runs += select(task, "plain", 0.0, rate)
    for task, method in itertools.product(TASKS, list(METHODS)[1:]):
        for strength in METHODS[method]:
            runs += select(task, method, strength, chosen[task].common)
        for rate in rates(chosen[task].common):
            runs += select(task, method, chosen[task].settings[method][0], rate)
    for seed, task in itertools.product(range(seeds), TASKS):
        for method, (strength, rate) in chosen[task].settings.items():
            runs.append(Run("final", "tfwd", task, method, strength, rate, seed))
    return list(dict.fromkeys(runs))


def peer_plan(lines: Lines, seeds: int = PEER_SEEDS) -> list[Run]:
    """Returns the runs of the plain method in PyTorch, at the common learning rates."""
    rates = {task: choose(lines, task).common for task in TASKS}
    return [
        Run("final", "pytorch", task, "plain", 0.0, rates[task], seed)
        for seed in range(seeds)
        for task in TASKS
    ]


def undecided(lines: Lines) -> list[Run]:
    """Returns the selection runs that are not finished."""
    return [run for run in plan(lines, 0) if run not in lines]


def seconds(run: Run, lines: Lines, default: float) -> float:
    """Returns the expected seconds of a run: the median of similar finished runs.

    Similar runs have the same peer and task. If some similar runs have the same method, only these
    runs count.
    """
    alike = [(r, line) for r, line in lines.items() if (r.peer, r.task) == (run.peer, run.task)]
    same = [line for r, line in alike if r.method == run.method]
    found: Sequence[Mapping[str, Any]] = same or [line for _, line in alike]
    return statistics.median(line["seconds"] for line in found) if found else default
