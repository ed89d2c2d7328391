"""keras-tuner's four oracles (random, grid, Bayesian, Hyperband), made fault-tolerant.

The grid's order of trials is rebuilt on a restart; keras-tuner does not save it, and its grid ends
there.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import keras_tuner
from keras_tuner.engine.hyperparameters import Float
from keras_tuner.engine.trial import TrialStatus

from tfwd.tuning.fault_tolerance import FaultTolerantOracle, Watcher

LARGEST_SEED = 2**31 - 1


class RandomOracle(FaultTolerantOracle, keras_tuner.oracles.RandomSearchOracle):
    """`RandomSearchOracle`, fault-tolerant."""


class BayesianOracle(FaultTolerantOracle, keras_tuner.oracles.BayesianOptimizationOracle):
    """`BayesianOptimizationOracle`, fault-tolerant."""


class HyperbandOracle(FaultTolerantOracle, keras_tuner.oracles.HyperbandOracle):
    """`HyperbandOracle`, fault-tolerant."""

    def rounds(self) -> list[list[tuple[int, int]]]:
        """Of each bracket, in the order they are run, the rounds: (trials, epochs in all)."""
        return [
            [(self._get_size(b, r), self._get_epochs(b, r)) for r in range(self._get_num_rounds(b))]
            for b in reversed(range(self._get_num_brackets()))
        ]


class GridOracle(FaultTolerantOracle, keras_tuner.oracles.GridSearchOracle):
    """`GridSearchOracle`, fault-tolerant, with a point for each worker that asks for one.

    keras-tuner's own gives the next point along the grid when the one before has ended, in case a
    trial finds another hyperparameter, so that all workers but one or two wait. Here the next one
    follows from it as soon as it is given out, and once more when it has ended.
    """

    def populate_space(self, trial_id: str) -> dict[str, Any]:
        found = super().populate_space(trial_id)
        if found["status"] == TrialStatus.RUNNING and trial_id not in self._populate_next:
            self._populate_next.append(trial_id)
        return found

    def reload(self) -> None:
        super().reload()
        values = {name: trial.hyperparameters.values for name, trial in self.trials.items()}
        order = functools.cmp_to_key(lambda a, b: self._compare(values[a], values[b]))
        for trial_id in sorted(values, key=order):
            self._ordered_ids.insert(trial_id)
            self._populate_next.append(trial_id)  # one whose next point was tried is passed over


METHODS = {
    "random": RandomOracle,
    "grid": GridOracle,
    "bayesian": BayesianOracle,
    "hyperband": HyperbandOracle,
}


def make_oracle(
    method: str,
    objective: str | keras_tuner.Objective,
    space: keras_tuner.HyperParameters | None = None,
    *,
    max_trials: int | None = None,
    max_epochs: int = 27,
    factor: int = 3,
    iterations: int = 1,
    seed: int = 0,
    worker_timeout: float | None = None,
    watcher: Watcher | None = None,
) -> keras_tuner.Oracle:
    """One of keras-tuner's oracles, by its method's name.

    Args:
        method: "random", "grid", "bayesian" or "hyperband".
        objective: the name of what is minimised, or an `Objective`.
        space: what is declared before the first trial. More may be declared by a model.
        max_trials: at most so many; None is all of a grid, and 10 of the others. Of no meaning for
            Hyperband, whose number of trials follows from its epochs.
        max_epochs, factor, iterations: of Hyperband: the epochs of its longest trials, by how much
            a round has fewer trials of more epochs than the one before, and how often it is done.
        seed: of the search: 0 is a seed as any other.
        worker_timeout, watcher: as in `FaultTolerantOracle`.

    Raises:
        ValueError: there is no such method.
            Or Hyperband's rounds need more points than there are in the space.
        ImportError: "bayesian" without scikit-learn and SciPy.

    Example:

    >>> oracle = make_oracle("hyperband", "val_loss", max_epochs=9)
    >>> oracle.rounds()
    [[(9, 1), (3, 3), (1, 9)], [(5, 3), (2, 9)], [(3, 9)]]
    """
    if method not in METHODS:
        raise ValueError(f"method {method!r}: give {', '.join(METHODS)}")
    if not 0 <= seed <= LARGEST_SEED:  # each draw has the next one, and NumPy's have 32 bits
        raise ValueError(f"seed={seed}: give a whole number, at least 0, at most {LARGEST_SEED}")
    options: dict[str, Any] = {
        "objective": objective,
        "hyperparameters": space,
        "seed": seed + 1,  # keras-tuner takes 0 for none, and draws one
        "worker_timeout": worker_timeout,
        "watcher": watcher,
    }
    if method == "hyperband":
        options.update(max_epochs=max_epochs, factor=factor, hyperband_iterations=iterations)
    elif max_trials is not None:
        options["max_trials"] = max_trials
    oracle = METHODS[method](**options)
    if method == "hyperband" and space is not None:
        _check_enough(oracle, space)
    return oracle


def _check_enough(oracle: HyperbandOracle, space: keras_tuner.HyperParameters) -> None:
    """keras-tuner draws no point twice, and promotes nobody before a round is full."""
    if any(isinstance(hp, Float) and hp.step is None for hp in space.space):
        return
    there = math.prod(len(list(hp.values)) for hp in space.space)
    needed = sum(rounds[0][0] for rounds in oracle.rounds())
    if there < needed:
        raise ValueError(
            f"Hyperband draws {needed} different points and the space has {there}: widen it, take "
            "fewer epochs, or another method"
        )
