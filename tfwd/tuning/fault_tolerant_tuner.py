"""`FaultTolerantTuner`: a keras-tuner tuner whose search survives stops, crashes and lost workers.

It runs trials in one process, or as one of the processes of `chief_and_workers`. It adds signs of
life, a pause between two requests for a trial, and a chief that ends when it cannot continue.
"""

from __future__ import annotations

import _thread
import contextlib
import io
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras_tuner.src.config
from keras_tuner.engine.base_tuner import BaseTuner
from keras_tuner.engine.trial import Trial

from tfwd._graph import custom_gradient
from tfwd.tuning import search_record, trial_failure_reasons
from tfwd.tuning.chief_and_workers import CHIEF, WORKER, check_address, role, wait_for_chief
from tfwd.tuning.fault_tolerant_oracle import FaultTolerantOracle
from tfwd.tuning.trial_watcher import Watcher

CHIEF_TIMEOUT = 300.0  # seconds that a worker waits for a chief that never answered
_IDLE_SECONDS = 0.5
_BEATS_PER_TIMEOUT = 5


class FaultTolerantTuner(BaseTuner):
    """Mixin that makes a keras-tuner `Tuner` fault-tolerant; it precedes the tuner's class.

    Args:
        worker_timeout: as in `FaultTolerantOracle`. A worker sends several signs of life in this
            time.
        check: function that is called before each request for a trial. An exception in it ends the
            search.
        chief_timeout: float. Seconds that a worker waits for the chief before its first request.
        say: function that a waiting worker calls with a line.
        watcher: the `Watcher` of the trials. In a worker it watches only this worker's trials. In
            the chief, or in a single process, it watches all trials.
        *args, **kwargs: the arguments of the tuner.
    """

    def __init__(
        self,
        *args: Any,
        worker_timeout: float | None = None,
        check: Callable[[], object] = lambda: None,
        chief_timeout: float = CHIEF_TIMEOUT,
        say: Callable[[str], object] = print,
        watcher: Watcher | None = None,
        **kwargs: Any,
    ):
        self._timeout, self._check = worker_timeout, check
        self._chief_timeout, self._say = chief_timeout, say
        check_address(role())
        parts = kwargs.get("directory") or ".", kwargs.get("project_name") or "untitled_project"
        search_record.check_files(os.path.join(*parts))
        self._last_request_was_empty = False
        with contextlib.redirect_stdout(io.StringIO()):  # keras-tuner prints that it reloads
            super().__init__(*args, **kwargs)
        self._watcher: Watcher | None = None
        if watcher is not None:
            self.watch(watcher)

    def watch(self, watcher: Watcher) -> None:
        """Sets the watcher of the trials."""
        self._watcher = watcher
        if not self._is_worker():
            self.oracle.watcher = watcher

    def _get_tuner_fname(self) -> str:
        # The chief and a single process use the same name, so that a single process can resume the
        # chief's sweep, and the reverse. keras-tuner reloads the oracle only if this file exists.
        name = super()._get_tuner_fname()
        return name if self._is_worker() else os.path.join(os.path.dirname(name), "tuner.json")

    def reload(self) -> None:
        try:
            super().reload()
        except Exception as error:
            if isinstance(error, ValueError) and not isinstance(error, search_record.NO_JSON):
                raise  # the oracle's own message
            raise ValueError(
                search_record.damaged_message(self._get_tuner_fname(), error)
            ) from error

    def search(self, *args: Any, **kwargs: Any) -> None:
        """Searches as keras-tuner does. The chief serves until every trial has ended.

        Raises:
            OSError: the sweep's state cannot be written.
            NoChief: this is a worker, and no chief answers.
        """
        if role() == WORKER:
            wait_for_chief(self._chief_timeout, self._say, self._check)
        with _less_output():
            if role() == CHIEF:
                with _watched_workers(self.oracle):
                    super().search(*args, **kwargs)
            else:
                super().search(*args, **kwargs)

    def on_search_begin(self) -> None:
        self.save()  # from now on a restart finds the sweep, even if no trial ended
        super().on_search_begin()

    def pre_create_trial(self) -> None:
        if self._last_request_was_empty:
            time.sleep(_IDLE_SECONDS)
        self._last_request_was_empty = True
        self._raise_failure()
        self._check()
        super().pre_create_trial()

    def on_trial_begin(self, trial: Trial) -> None:
        self._last_request_was_empty = False
        self._raise_failure()
        if self._watcher is not None and self._is_worker():
            self._watcher.began(trial)
        super().on_trial_begin(trial)

    def on_trial_end(self, trial: Trial) -> None:
        message = trial.message
        trial_failure_reasons.store(trial, self.get_trial_dir(trial.trial_id))
        super().on_trial_end(trial)
        if self._watcher is not None and self._is_worker():
            known = self.oracle.get_trial(trial.trial_id)  # the chief's trial, which has a score
            known.message = known.message or message
            self._watcher.ended(known)

    def _raise_failure(self) -> None:
        failure = None if self._is_worker() else self.oracle.failure
        if failure is not None:
            raise failure

    def _run_and_update_trial(self, trial: Trial, *args: Any, **kwargs: Any) -> None:
        try:
            with self._signs_of_life(trial):
                super()._run_and_update_trial(trial, *args, **kwargs)
        finally:
            custom_gradient.release_models()  # otherwise TensorFlow would keep the trial's model

    @contextlib.contextmanager
    def _signs_of_life(self, trial: Trial) -> Iterator[None]:
        """Requests the running trial from the chief repeatedly, as a sign of life."""
        if self._timeout is None or not self._is_worker():
            yield
            return
        over = threading.Event()
        pause = self._timeout / _BEATS_PER_TIMEOUT

        def beat() -> None:
            while not over.wait(pause):
                with contextlib.suppress(Exception):  # a lost chief may return
                    self.oracle.get_trial(trial.trial_id)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()


@contextlib.contextmanager
def _less_output() -> Iterator[None]:
    """Suppresses a warning about retracing, and the tracebacks of failed trials.

    Each trial has its own functions, so TensorFlow's warning is irrelevant. keras-tuner also stores
    the traceback in `trial.message`.
    """

    def keep(record: logging.LogRecord) -> bool:
        return "triggered tf.function retracing" not in str(record.msg)

    logger = logging.getLogger("tensorflow")
    logger.addFilter(keep)
    debug, keras_tuner.src.config.DEBUG = keras_tuner.src.config.DEBUG, False
    try:
        yield
    finally:
        logger.removeFilter(keep)
        keras_tuner.src.config.DEBUG = debug


@contextlib.contextmanager
def _watched_workers(oracle: FaultTolerantOracle) -> Iterator[None]:
    """Releases the trials of lost workers while the chief serves. Ends a chief that cannot write.

    keras-tuner's server answers in threads. An exception there does not reach the main thread.
    """
    over = threading.Event()

    def look() -> None:
        while not over.wait(_IDLE_SECONDS):
            if oracle.failure is not None:
                _thread.interrupt_main()
                return
            oracle.release_trials_of_lost_workers()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        if oracle.failure is not None:
            raise oracle.failure from None
        raise
    finally:
        over.set()
        thread.join(timeout=2 * _IDLE_SECONDS)
