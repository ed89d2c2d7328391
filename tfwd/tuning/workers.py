"""A process that runs trials: the only one, or one of several that a chief gives trials to.

Who is who is keras-tuner's: the variables KERASTUNER_TUNER_ID ("chief" is in the chief's),
KERASTUNER_ORACLE_IP and KERASTUNER_ORACLE_PORT. Added here are signs of life, a pause between two
questions for a trial, and a chief that ends when it cannot go on.
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
from pathlib import Path
from typing import Any

import keras_tuner.src.config
from keras_tuner.engine.base_tuner import BaseTuner
from keras_tuner.engine.trial import Trial

from tfwd import custom_gradient
from tfwd.files import write_atomically
from tfwd.tuning.oracles import Sturdy

CHIEF, WORKER, ALONE = "chief", "worker", "alone"
ERROR = "error.txt"  # in a trial's folder: the traceback of one that failed
_IDLE_SECONDS = 0.5
_BEATS_PER_TIMEOUT = 5


def role() -> str:
    """Which of `CHIEF`, `WORKER` and `ALONE` this process is.

    Raises:
        ValueError: some of keras-tuner's three variables are set, and not all.
    """
    names = ("KERASTUNER_TUNER_ID", "KERASTUNER_ORACLE_IP", "KERASTUNER_ORACLE_PORT")
    unset = [name for name in names if not os.environ.get(name)]
    if len(unset) == len(names) or unset == list(names[1:]):
        return ALONE
    if unset:
        raise ValueError(f"{' and '.join(unset)} must be set too, to share a sweep")
    return CHIEF if "chief" in os.environ["KERASTUNER_TUNER_ID"] else WORKER


class Steady(BaseTuner):
    """What is added to a keras-tuner `Tuner`; it stands before the tuner's class.

    Args:
        worker_timeout: as in `Sturdy`; the signs of life come several times as often.
        check: called before a trial is asked for; what it raises ends the search.
        *args, **kwargs: the tuner's.
    """

    def __init__(
        self,
        *args: Any,
        worker_timeout: float | None = None,
        check: Callable[[], object] = lambda: None,
        **kwargs: Any,
    ):
        self._timeout, self._check = worker_timeout, check
        self._asked_in_vain = False
        with contextlib.redirect_stdout(io.StringIO()):  # keras-tuner says that it reloads
            super().__init__(*args, **kwargs)

    def _get_tuner_fname(self) -> str:
        # One name for the chief and for a process alone, so that either goes on with the other's
        # sweep: keras-tuner reloads the oracle if, and only if, this file exists.
        name = super()._get_tuner_fname()
        return name if self._is_worker() else os.path.join(os.path.dirname(name), "tuner.json")

    def search(self, *args: Any, **kwargs: Any) -> None:
        """As keras-tuner's; the chief serves until every trial is accounted for.

        Raises:
            OSError: the sweep's state cannot be written.
        """
        with _quiet():
            if role() == CHIEF:
                with _guarded(self.oracle):
                    super().search(*args, **kwargs)
            else:
                super().search(*args, **kwargs)

    def on_search_begin(self) -> None:
        self.save()  # from here on a start finds the sweep, also if no trial came to its end
        super().on_search_begin()

    def pre_create_trial(self) -> None:
        if self._asked_in_vain:
            time.sleep(_IDLE_SECONDS)
        self._asked_in_vain = True
        self._raise_failure()
        self._check()
        super().pre_create_trial()

    def on_trial_begin(self, trial: Trial) -> None:
        self._asked_in_vain = False
        self._raise_failure()
        super().on_trial_begin(trial)

    def on_trial_end(self, trial: Trial) -> None:
        if trial.message:  # the chief is not told of it otherwise
            folder = Path(self.get_trial_dir(trial.trial_id))
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / ERROR, trial.message)
        super().on_trial_end(trial)

    def _raise_failure(self) -> None:
        failure = None if self._is_worker() else self.oracle.failure
        if failure is not None:
            raise failure

    def _run_and_update_trial(self, trial: Trial, *args: Any, **kwargs: Any) -> None:
        try:
            with self._signs_of_life(trial):
                super()._run_and_update_trial(trial, *args, **kwargs)
        finally:
            custom_gradient.release()  # or TensorFlow would keep the trial's model

    @contextlib.contextmanager
    def _signs_of_life(self, trial: Trial) -> Iterator[None]:
        """Asks the chief for the trial again and again, as long as it runs."""
        if self._timeout is None or not self._is_worker():
            yield
            return
        over = threading.Event()
        pause = self._timeout / _BEATS_PER_TIMEOUT

        def beat() -> None:
            while not over.wait(pause):
                with contextlib.suppress(Exception):  # a chief that is away may come back
                    self.oracle.get_trial(trial.trial_id)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()


def error_text(trial: Trial, folder: str | os.PathLike[str]) -> str:
    """The traceback of a failed trial; of one that another process ran, from its folder."""
    try:
        return trial.message or (Path(folder) / ERROR).read_text(encoding="utf-8")
    except OSError:
        return ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out what says nothing here, or is said better elsewhere.

    That is TensorFlow's warning of functions traced again (each trial has its own), and the
    traceback of a trial that failed, which keras-tuner prints and keeps in `trial.message`.
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
def _guarded(oracle: Sturdy) -> Iterator[None]:
    """While the chief serves: takes lost workers' trials back, and ends it if it cannot write.

    keras-tuner's server answers in threads; what is raised there does not reach it.
    """
    over = threading.Event()

    def look() -> None:
        while not over.wait(_IDLE_SECONDS):
            if oracle.failure is not None:
                _thread.interrupt_main()
                return
            oracle.release_lost()

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
