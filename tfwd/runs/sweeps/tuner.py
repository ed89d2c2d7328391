"""Tuner of a sweep: keras-tuner's search, in which trials are runs of a program."""

from __future__ import annotations

import errno
import math
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_collections
import tensorflow as tf
from keras_tuner import Oracle
from keras_tuner.engine.trial import Trial, TrialStatus
from keras_tuner.errors import FailedTrialError, FatalError

from tfwd.runs.errors import UserError
from tfwd.runs.interfaces import Data
from tfwd.runs.settings.config import get
from tfwd.runs.sweeps import tensorboard_hparams
from tfwd.runs.sweeps.live_table import Board
from tfwd.runs.sweeps.sweep import Sweep, apply
from tfwd.runs.sweeps.sweep_folder import SweepFolder
from tfwd.runs.sweeps.trial_rows import OBJECTIVE
from tfwd.runs.sweeps.trial_run import promote, run
from tfwd.runs.training.non_finite_steps import Diverged
from tfwd.runs.training.stop_signals import Stopped, StopRequest
from tfwd.runs.training.train_command import free_memory
from tfwd.tuning.fault_tolerant_tuner import FaultTolerantTuner
from tfwd.tuning.search_space import read

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class SweepEnd(FatalError):
    """Error that ends the sweep, and not only the trial. `cause` is the reason."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


class RunTuner(FaultTolerantTuner):
    """keras-tuner tuner that runs the trials of a sweep.

    Args:
        oracle: keras-tuner's oracle, from `tfwd.tuning.oracles.make_oracle`.
        sweep: the sweep.
        config: the configuration that the trials change.
        data: the data of this configuration.
        folder: the opened `SweepFolder`.
        board: the board that shows the trials.
        stop: the stop request, checked after every step and between trials.
        worker_timeout: as in `FaultTolerantTuner`.
    """

    def __init__(
        self,
        oracle: Oracle,
        sweep: Sweep,
        config: ml_collections.ConfigDict,
        data: Data,
        folder: SweepFolder,
        board: Board,
        stop: StopRequest,
        worker_timeout: float | None = None,
    ):
        self._sweep, self._config, self._folder = sweep, config, folder
        self._program = folder.program
        self._board, self._stop = board, stop
        self._data = {self._data_key(config): data}
        super().__init__(
            oracle,
            directory=folder.path.parent,
            project_name=folder.path.name,
            worker_timeout=worker_timeout,
            check=self._check_stop,
            watcher=board,
        )

    def _check_stop(self) -> None:
        if self._stop:
            raise SweepEnd(self._stop.error())

    def run_trial(self, trial: Trial) -> dict[str, float]:
        """Trains the trial's runs, one seed after the other.

        Returns:
            dict with `loss` (the mean of the runs' best validation losses), the best loss of each
            run, the epochs and the seconds.
        """
        with _classified_errors():
            chosen = trial.hyperparameters.values
            schema, score = self._program.schema, self._program.score
            values = read(self._sweep.space, chosen)
            config = apply(self._config, values, schema)
            config.training.epochs = chosen.get("tuner/epochs", config.training.epochs)
            config.training.keep_checkpoints = 1
            results = []
            for execution in range(self._sweep.executions_per_trial):
                own = apply(config, {"seed": config.seed + execution}, schema)
                folder = self._folder.run_folder(trial.trial_id, execution)
                if "tuner/trial_id" in chosen:
                    promote(self._folder.run_folder(chosen["tuner/trial_id"], execution), folder)
                folder.parent.mkdir(parents=True, exist_ok=True)

                def report(epochs: int, share: float, loss: float, run: int = execution) -> None:
                    self._board.progress(trial.trial_id, run, epochs, share, loss)

                try:
                    data = self._data_of(own)
                    result = run(self._program, own, data, folder, self._stop, report)
                    if not math.isfinite(result.loss):
                        raise UserError("no validation loss was finite")
                    tensorboard_hparams.write(
                        folder / "tensorboard", trial.trial_id, values, result, score
                    )
                except UserError as error:
                    if not _is_disk_error(error):
                        tensorboard_hparams.write(
                            folder / "tensorboard", trial.trial_id, values, None, score
                        )
                    raise
                finally:
                    free_memory()
                results.append(result)
        losses = [result.loss for result in results]
        return {
            OBJECTIVE: sum(losses) / len(losses),
            **{f"loss-{number}": loss for number, loss in enumerate(losses)},
            "epochs": max(result.epochs for result in results),
            "seconds": sum(result.seconds for result in results),
        }

    def on_trial_end(self, trial: Trial) -> None:
        super().on_trial_end(trial)
        if trial.status == TrialStatus.COMPLETED and self._sweep.method != "hyperband":
            # Only Hyperband continues a trial. The best weights are kept.
            for path in self._folder.trial_folder(trial.trial_id).glob("run-*/checkpoints"):
                shutil.rmtree(path, ignore_errors=True)

    def _data_of(self, config: ml_collections.ConfigDict) -> Data:
        named = self._data_key(config)
        if named not in self._data:  # the sweep varies the keys of the data
            self._data = {named: self._program.read_data(config)}
        return self._data[named]

    def _data_key(self, config: ml_collections.ConfigDict) -> tuple[Any, ...]:
        return tuple(get(config, key) for key in self._program.data_keys)


def _is_disk_error(error: UserError) -> bool:
    return isinstance(error.__cause__, (OSError, tf.errors.OpError))


@contextmanager
def _classified_errors() -> Iterator[None]:
    """Distinguishes errors that end the sweep from errors that end only the trial.

    A stop, and a disk that cannot be written, end the sweep. The trial is resumed later. Any other
    exception makes the trial fail, such as a run that diverged or cannot be trained.
    """
    try:
        yield
    except Stopped as stopped:
        raise SweepEnd(stopped) from stopped
    except UserError as error:
        if _is_disk_error(error):
            raise SweepEnd(error) from error
        text = error.short if isinstance(error, Diverged) else str(error)
        raise FailedTrialError(text) from error
    except OSError as error:
        if error.errno in _DISK:
            raise SweepEnd(UserError(f"cannot write: {error}")) from error
        traceback.clear_frames(error.__traceback__)
        raise
    except Exception as error:
        # keras-tuner stores only the text. The frames would keep the model in memory until then.
        traceback.clear_frames(error.__traceback__)
        raise
