"""keras-tuner oracles that survive stops, crashes and lost workers.

keras-tuner does the search. This file adds:

- The state is written to a temporary file, which then replaces the old file. A kill therefore
  leaves the old or the new state.
- A trial that is not in the state is removed. A kill between two files can cause this.
- The trial of a lost worker goes to another worker. keras-tuner's own chief would wait forever for
  the lost worker.
- No worker ends while another worker's trial may still need a new worker.
- Any number of trials may fail. The table has each failed trial with its reason. A failed trial is
  never among the best trials. keras-tuner adds failed trials if there are too few other trials.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import keras_tuner
from keras_tuner.engine.trial import Trial, TrialStatus

from tfwd.tuning import search_record
from tfwd.tuning.search_space import hp_text
from tfwd.tuning.trial_watcher import Watcher

LOSSES_ALLOWED = 3


class FaultTolerantOracle(keras_tuner.Oracle):
    """Mixin that makes an oracle fault-tolerant; it precedes the oracle's class.

    Args:
        worker_timeout: float. Seconds of silence after which a worker counts as lost. None disables
            the timeout, for a single process.
        watcher: the `Watcher` of the trials.
        clock: function that returns the time in seconds. Tests replace it.
        **kwargs: the arguments of the oracle.
    """

    def __init__(
        self,
        worker_timeout: float | None = None,
        watcher: Watcher | None = None,
        clock: Callable[[], float] = time.monotonic,
        **kwargs: Any,
    ):
        super().__init__(max_consecutive_failed_trials=sys.maxsize, **kwargs)
        self._display.verbose = 0
        self.watcher = watcher
        self.failure: Exception | None = None  # why the search cannot continue
        self._timeout, self._clock = worker_timeout, clock
        self._seen: dict[str, float] = {}  # by trial: time of its worker's last sign of life
        self._asked: dict[str, float] = {}  # by worker: time of its last request for a trial
        self._losses: dict[str, int] = {}
        self._was_ongoing: dict[str, Trial] = {}

    @property
    def verbose(self) -> int:
        """Returns 0, because the watcher replaces keras-tuner's display."""
        return self._display.verbose

    @verbose.setter
    def verbose(self, value: object) -> None:  # keras-tuner's `search` sets it
        pass

    def get_best_trials(self, num_trials: int = 1) -> list[Trial]:
        """Returns the best completed trials, at most `num_trials`."""
        best = super().get_best_trials(num_trials)
        return [trial for trial in best if trial.status == TrialStatus.COMPLETED]

    @keras_tuner.synchronized
    def create_trial(self, tuner_id: str) -> Trial:
        self._asked[tuner_id] = self._clock()
        self.release_trials_of_lost_workers(besides=tuner_id)
        trial = super().create_trial(tuner_id)
        if trial.status == TrialStatus.RUNNING:
            self._seen[trial.trial_id] = self._clock()
            self._tell("began", trial)
        elif trial.status == TrialStatus.STOPPED and self.ongoing_trials:
            trial.status = TrialStatus.IDLE
            self.tuner_ids.add(tuner_id)  # a waiting worker has not left yet
        return trial

    @keras_tuner.synchronized
    def end_trial(self, trial: Trial) -> None:
        if trial.trial_id in self.end_order:
            return  # a lost worker has returned, after another worker ended the trial
        if trial.trial_id in self._retry_queue:
            self._retry_queue.remove(trial.trial_id)
        super().end_trial(trial)
        self.save()  # keras-tuner saves while the trial still counts as running
        self._tell("ended", self.trials[trial.trial_id])

    def get_trial(self, trial_id: str) -> Trial:
        # Workers ask for their trial every few seconds, which shows that they are alive.
        self._seen[trial_id] = self._clock()
        return super().get_trial(trial_id)

    @keras_tuner.synchronized
    def release_trials_of_lost_workers(self, besides: str = "") -> None:
        """Makes the trials of lost workers available to the next worker that asks."""
        if self._timeout is None:
            return
        for worker, trial in list(self.ongoing_trials.items()):
            silent = self._clock() - self._seen.get(trial.trial_id, 0.0)
            if worker == besides or silent < self._timeout:
                continue
            self.tuner_ids.discard(worker)
            losses = self._losses[trial.trial_id] = self._losses.get(trial.trial_id, 0) + 1
            if losses >= LOSSES_ALLOWED:
                trial.status = TrialStatus.FAILED
                trial.message = f"its worker was lost {losses} times"
                self.end_trial(trial)
                continue
            del self.ongoing_trials[worker]
            self._retry_queue.append(trial.trial_id)
            self.save()
            self._tell("lost", trial, worker)
        for worker in self.tuner_ids - set(self.ongoing_trials):
            if self._clock() - self._asked.get(worker, 0.0) >= self._timeout:
                self.tuner_ids.discard(worker)

    def _tell(self, what: str, *facts: Any) -> None:
        if self.watcher is not None:
            try:
                getattr(self.watcher, what)(*facts)
            except Exception as error:  # as in _replace
                self.failure = error

    def save(self) -> None:
        self._replace(self._get_oracle_fname, super(keras_tuner.Oracle, self).save)

    def _save_trial(self, trial: Trial) -> None:
        def path() -> str:
            return os.path.join(self._get_trial_dir(trial.trial_id), "trial.json")

        self._replace(path, trial.save)

    def _replace(self, path: Callable[[], str], save: Callable[[str], object]) -> None:
        # Do not raise here: keras-tuner would hold its lock forever. The tuner checks `failure`.
        try:
            final = path()
            save(f"{final}.new")
            os.replace(f"{final}.new", final)
        except OSError as error:
            self.failure = error

    def set_state(self, state: dict[str, Any]) -> None:
        declared = self.hyperparameters
        super().set_state(state)
        self._was_ongoing = dict(self.ongoing_trials)
        saved = {hp.name: hp for hp in self.hyperparameters.space}
        different = [
            f"{hp.name} was {hp_text(saved.get(hp.name))} and is {hp_text(hp)}"
            for hp in declared.space
            if hp.name not in saved or saved[hp.name].get_config() != hp.get_config()
        ]
        if different:
            raise ValueError(search_record.rejection_message(self._project_dir, different))

    def reload(self) -> None:
        try:
            super().reload()
        # The files may hold anything.
        except Exception as error:
            if isinstance(error, ValueError) and not isinstance(error, search_record.NO_JSON):
                raise  # the error of `set_state`
            folder = os.path.abspath(self._project_dir)
            what = f"oracle.json, or a trial.json, in {folder}"
            raise ValueError(search_record.damaged_message(what, error)) from error
        lost = [trial_id for trial_id in self.start_order if trial_id not in self.trials]
        if lost:  # keras-tuner would run a trial with this number again and again
            raise ValueError(
                f"{os.path.abspath(self._project_dir)} has no trial.json of trial {lost[0]}, which "
                "its oracle.json lists: restore it from a copy, or start again in another directory"
            )
        for trial_id in set(self.trials) - set(self.start_order):
            del self.trials[trial_id]
        for name in set(self._retry_queue) & set(self.end_order):
            self._retry_queue.remove(name)
        if self._timeout is None:
            return
        # The chief was restarted. Its workers may still be running, so it waits for them.
        for worker, trial in self._was_ongoing.items():
            if trial.trial_id not in self._retry_queue:
                continue
            self._retry_queue.remove(trial.trial_id)
            self.ongoing_trials[worker] = trial
            self.tuner_ids.add(worker)
            self._seen[trial.trial_id] = self._clock()
