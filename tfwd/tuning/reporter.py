"""Prints the progress of a search: a line before and after each trial, and why a trial failed."""

from __future__ import annotations

import datetime
import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import keras_tuner
from keras_tuner.engine.trial import Trial, TrialStatus

from tfwd.tuning.stopwatch import spent
from tfwd.tuning.workers import error_text

_OWN = "tuner/"  # Hyperband's own entries among the values


class TrialReporter:
    """Reporter of trials on the terminal: the oracle's watcher, or called where the trials run.

    Args:
        oracle: the oracle, which knows the best trial so far.
        folder: function from a trial's number to its folder. The folder has the trial's time before
            this process resumed it, and the reason of a failure in another process.
        clock: function that returns the time in seconds. Tests replace it.

    Attributes:
        verbose: bool. Prints more than failures.
    """

    def __init__(
        self,
        oracle: keras_tuner.Oracle,
        folder: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.verbose = True
        self._oracle, self._folder, self._clock = oracle, folder, clock
        self._began: dict[str, float] = {}

    def line(self, text: str) -> None:
        """Prints a line, unless the user wants no output."""
        if self.verbose:
            print(text, flush=True)

    def began(self, trial: Trial) -> None:
        """Prints that a trial starts or resumes."""
        self._began[trial.trial_id] = self._clock() - spent(self._folder(trial.trial_id))
        own, texts = trial.hyperparameters.values, [values_text(trial)]
        if "tuner/epochs" in own:
            texts.append(f"to {own['tuner/epochs']} epochs")
        if "tuner/trial_id" in own:
            texts.append(f"continuing trial {own['tuner/trial_id']}")
        self.line(f"{self._name(trial)}: {', '.join(texts)}")

    def ended(self, trial: Trial) -> None:
        """Prints the result of a trial that ended."""
        seconds = self._clock() - self._began.get(trial.trial_id, self._clock())
        took = datetime.timedelta(seconds=round(seconds))
        if trial.status != TrialStatus.COMPLETED:
            text = error_text(trial, self._folder(trial.trial_id))
            why = reason(text) or "see the output of its worker"
            print(f"{self._name(trial)} failed: {values_text(trial)}: {why} [{took}]", flush=True)
            return
        name, best = self._oracle.objective.name, self._oracle.get_best_trials(1)
        so_far = f"; best so far {best[0].score:.6g}, trial {best[0].trial_id}" if best else ""
        self.line(f"{self._name(trial)}: {name} {trial.score:.6g}{so_far} [{took}]")

    def lost(self, trial: Trial, worker: str) -> None:
        """Prints that a worker was silent for too long."""
        self.line(f"{worker} is silent: trial {trial.trial_id} waits for another worker")

    def _name(self, trial: Trial) -> str:
        most = getattr(self._oracle, "max_trials", None)
        known = most and not isinstance(self._oracle, keras_tuner.oracles.HyperbandOracle)
        return f"trial {trial.trial_id}" + (f" (of {most})" if known else "")


def values_text(trial: Trial) -> str:
    """Returns the values of a trial, in one line."""
    values = trial.hyperparameters.values.items()
    texts = [f"{name}={_text(value)}" for name, value in values if not name.startswith(_OWN)]
    return ", ".join(texts) or "nothing is varied"


def reason(message: str | None) -> str:
    r"""Returns why a trial failed, in one line, from the traceback that keras-tuner stores.

    Example:
    >>> reason('Traceback (...):\n  File "a.py", line 1, in f\n    g()\nValueError: too bad\nmore')
    'ValueError: too bad'
    >>> reason("keras_tuner.src.errors.FailedTrialError: val_loss is not finite")
    'val_loss is not finite'
    """
    lines = re.sub(r"\x1b\[[\d;]*m", "", message or "").strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    rest = lines[frames[-1] + 1 :] if frames else lines
    # Below the last frame is its line of code, then the exception, which is not indented.
    below = itertools.dropwhile(lambda line: not line[:1].strip() or line[:9] == "Traceback", rest)
    said = [line.strip() for line in below if line.strip()]
    if not said:
        return ""
    first = said[0]
    if len(said) > 1 and first.endswith("in user code:"):  # AutoGraph's frames come between
        first = said[-1]
    elif len(said) > 1 and "Exception encountered when calling" in first:  # Keras's first line
        first = f"{first.partition(':')[0]}: {said[1]}"
    name, _, text = first.partition(": ")
    # The class is useless if tfwd raised the exception. For a crash it is half of the message.
    return text if text and name.endswith("FailedTrialError") else _without_module(first)


def _without_module(line: str) -> str:
    return re.sub(r"^(?:\w+\.)+(?=\w+(?::|$))", "", line)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
