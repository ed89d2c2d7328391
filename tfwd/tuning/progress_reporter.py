"""Prints the progress of a search: a line before and after each trial, and why a trial failed."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import keras_tuner
from keras_tuner.engine.trial import Trial, TrialStatus

from tfwd.tuning import trial_failure_reasons
from tfwd.tuning.trial_watcher import Watcher

_OWN = "tuner/"  # Hyperband's own entries among the values


class TrialReporter(Watcher):
    """Watcher that prints a line before and after each trial.

    Args:
        oracle: the oracle of the search. It has the best trial so far.
        folder, clock: as in `Watcher`.

    Attributes:
        verbose: bool. False prints only failures.
    """

    def __init__(
        self,
        oracle: keras_tuner.Oracle,
        folder: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(folder, clock)
        self.verbose, self._oracle = True, oracle

    def line(self, text: str) -> None:
        """Prints a line, unless `verbose` is False."""
        if self.verbose:
            print(text, flush=True)

    def began(self, trial: Trial) -> None:
        """Prints that a trial starts or resumes."""
        super().began(trial)
        own, texts = trial.hyperparameters.values, [values_text(trial)]
        if "tuner/epochs" in own:
            texts.append(f"to {own['tuner/epochs']} epochs")
        if "tuner/trial_id" in own:
            texts.append(f"continuing trial {own['tuner/trial_id']}")
        self.line(f"{self._name(trial)}: {', '.join(texts)}")

    def ended(self, trial: Trial) -> None:
        """Prints the result of a trial that ended."""
        took = datetime.timedelta(seconds=round(self.seconds(trial.trial_id) or 0.0))
        if trial.status != TrialStatus.COMPLETED:
            folder = self._trial_folder(trial.trial_id)
            why = trial_failure_reasons.reason(trial, folder) or "see the output of its worker"
            print(f"{self._name(trial)} failed: {values_text(trial)}: {why} [{took}]", flush=True)
            return
        name, best = self._oracle.objective.name, self._oracle.get_best_trials(1)
        so_far = f"; best so far {best[0].score:.6g}, trial {best[0].trial_id}" if best else ""
        self.line(f"{self._name(trial)}: {name} {trial.score:.6g}{so_far} [{took}]")

    def _name(self, trial: Trial) -> str:
        most = getattr(self._oracle, "max_trials", None)
        known = most and not isinstance(self._oracle, keras_tuner.oracles.HyperbandOracle)
        return f"trial {trial.trial_id}" + (f" (of {most})" if known else "")


def values_text(trial: Trial) -> str:
    """Returns the values of a trial, in one line."""
    values = trial.hyperparameters.values.items()
    texts = [f"{name}={_text(value)}" for name, value in values if not name.startswith(_OWN)]
    return ", ".join(texts) or "nothing is varied"


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
