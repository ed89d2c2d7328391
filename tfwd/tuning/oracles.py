"""keras-tuner's four oracles (random, grid, Bayesian, Hyperband), made fault-tolerant.

A restart rebuilds the order of the grid's trials. keras-tuner does not save this order, so its grid
search ends at a restart.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import keras_tuner
from keras_tuner.engine.hyperparameters import Float
from keras_tuner.engine.trial import TrialStatus

from tfwd.tuning.fault_tolerant_oracle import FaultTolerantOracle
from tfwd.tuning.trial_watcher import Watcher

LARGEST_SEED = 2**31 - 1


class RandomOracle(FaultTolerantOracle, keras_tuner.oracles.RandomSearchOracle):
    """Fault-tolerant `RandomSearchOracle`."""


class BayesianOracle(FaultTolerantOracle, keras_tuner.oracles.BayesianOptimizationOracle):
    """Fault-tolerant `BayesianOptimizationOracle`."""


class HyperbandOracle(FaultTolerantOracle, keras_tuner.oracles.HyperbandOracle):
    """Fault-tolerant `HyperbandOracle`."""

    def rounds(self) -> list[list[tuple[int, int]]]:
        """Returns the rounds of each bracket, in order: (trials, total epochs)."""
        return [
            [(self._get_size(b, r), self._get_epochs(b, r)) for r in range(self._get_num_rounds(b))]
            for b in reversed(range(self._get_num_brackets()))
        ]


class GridOracle(FaultTolerantOracle, keras_tuner.oracles.GridSearchOracle):
    """Fault-tolerant `GridSearchOracle` that always has a point for a worker.

    keras-tuner's own oracle gives the next grid point only when the previous trial has ended,
    because a trial may declare another hyperparameter. All workers except one or two then wait.
    Here the next point is available as soon as a worker gets a point, and again when the trial has
    ended.
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
            self._populate_next.append(trial_id)  # skipped later if its next point was tried


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
    """Makes one of keras-tuner's oracles, by the name of its method.

    Args:
        method: "random", "grid", "bayesian" or "hyperband".
        objective: the name of the minimised value, or an `Objective`.
        space: hyperparameters that are declared before the first trial. A model may declare more.
        max_trials: int. The maximum number of trials. None means the whole grid, or 10 for other
            methods. Hyperband ignores it: its number of trials follows from its epochs.
        max_epochs, factor, iterations: int, for Hyperband: the epochs of its longest trials; the
            factor by which a round has fewer trials with more epochs than the round before; and how
            often the search is repeated.
        seed: int. The seed of the search. 0 is a seed like any other.
        worker_timeout, watcher: as in `FaultTolerantOracle`.

    Raises:
        ValueError: there is no such method, or Hyperband's rounds need more points than the space
            has.
        ImportError: "bayesian" without scikit-learn and SciPy.

    Example:
    >>> oracle = make_oracle("hyperband", "val_loss", max_epochs=9)
    >>> oracle.rounds()
    [[(9, 1), (3, 3), (1, 9)], [(5, 3), (2, 9)], [(3, 9)]]
    """
    if method not in METHODS:
        raise ValueError(f"method {method!r}: give {', '.join(METHODS)}")
    if not 0 <= seed <= LARGEST_SEED:  # draws use the next seeds, and a NumPy seed has 32 bits
        raise ValueError(f"seed={seed}: give a whole number, at least 0, at most {LARGEST_SEED}")
    options: dict[str, Any] = {
        "objective": objective,
        "hyperparameters": space,
        "seed": seed + 1,  # keras-tuner treats 0 as no seed, and draws one
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
    """Checks that the space has enough points for Hyperband.

    keras-tuner draws no point twice, and promotes no trial before a round is full.
    """
    if any(isinstance(hp, Float) and hp.step is None for hp in space.space):
        return
    available = math.prod(len(list(hp.values)) for hp in space.space)
    needed = sum(rounds[0][0] for rounds in oracle.rounds())
    if available < needed:
        raise ValueError(
            f"Hyperband draws {needed} different points and the space has {available}: give more "
            "values, fewer epochs, or another method"
        )
