"""Folder of a sweep: its files, its lock, and the check that it belongs to this sweep.

sweep.json                       the description of the sweep
oracle.json  tuner.json          keras-tuner's state
trial_3/trial.json               keras-tuner's record of a trial (trial_03, trial_0003: see `trial`)
trial_3/run-0/                   the folder of a training run; run-1 has another seed
trials.csv  best_config.py  plots/  tensorboard/     the results
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_collections

from tfwd.runs.errors import UserError, as_user_error
from tfwd.runs.program_base import Program
from tfwd.runs.settings.config import flat_keys, get
from tfwd.runs.settings.config_keys import MayChange
from tfwd.runs.storage.file_access import read_json, remove, write_file
from tfwd.runs.storage.folder_lock import FolderLock
from tfwd.runs.sweeps.sweep import Sweep
from tfwd.tuning import stopwatch

_OURS = (
    "sweep.json",
    "oracle.json*",
    "tuner.json",
    "trial_*",
    "trials.csv",
    "best_config.py",
    "plots",
    "tensorboard",
)


class SweepFolder:
    """Paths and lock in the folder of a sweep.

    Args:
        path: path of the folder. It need not exist.
        program: the program whose runs are the trials.
    """

    def __init__(self, path: str | os.PathLike[str], program: Program):
        self.path, self.program = Path(os.path.abspath(path)), program
        self.description = self.path / "sweep.json"
        self.table = self.path / "trials.csv"
        self.best_config = self.path / "best_config.py"
        self.plots = self.path / "plots"
        self.plot = self.plots / "trials.png"
        self.tensorboard = self.path / "tensorboard"
        self._lock: FolderLock | None = None
        self._again = self._begun = self._fresh = False

    def trial_folder(self, trial_id: str) -> Path:
        """Returns the folder of a trial, which keras-tuner names.

        The number has as many digits as `max_trials`, or four without `max_trials`.
        """
        return self.path / f"trial_{trial_id}"

    def seconds_spent(self, trial_id: str) -> float:
        """Returns the seconds that a trial's runs have recorded so far."""
        return stopwatch.spent(self.trial_folder(trial_id))

    def run_folder(self, trial_id: str, execution: int) -> Path:
        """Returns the folder of one of a trial's runs."""
        return self.trial_folder(trial_id) / f"run-{execution}"

    def open(self, description: dict[str, Any], overwrite: bool) -> bool:
        """Locks the folder, and checks that it holds this sweep or nothing.

        A sweep that is rejected before `begin` leaves nothing in the folder.

        Args:
            description: dict from `describe`.
            overwrite: bool. Removes an existing sweep.

        Returns:
            True if an existing sweep is resumed.

        Raises:
            UserError: the folder cannot be written, another process searches in it, or it holds
                another sweep or other files.
        """
        busy = f"another process searches in the workdir {self.path}"
        self._lock = FolderLock(self.path, busy)
        self._again = self._begun = self._fresh = False
        try:
            exists = os.path.lexists(self.description)
            others = ("config.json", *_OURS[1:4])
            if not exists and any(next(self.path.glob(name), None) for name in others):
                raise UserError(
                    f"the workdir {self.path} holds files that are not a sweep of tfwd-tune; give "
                    "another --workdir"
                )
            if exists and overwrite:
                self._clear()
            elif exists:
                self.verify(description)
                self._again = True
            for folder in (self.plots, self.tensorboard):
                if os.path.lexists(folder) and not folder.is_dir():
                    raise UserError(f"{folder} is a file, but a sweep needs a folder; remove it")
            self._fresh = not any(next(self.path.glob(name), None) for name in _OURS)
        except OSError as error:
            self.close()
            raise UserError(f"cannot write the workdir {self.path}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise
        return self._again

    def begin(self, description: dict[str, Any]) -> None:
        """Writes the description of the sweep. From then on the folder belongs to this sweep.

        Raises:
            UserError: the folder cannot be written.
        """
        write_file(self.description, json.dumps(description, indent=2) + "\n")
        self._begun = True
        with as_user_error(f"cannot write the workdir {self.path}", OSError):
            for folder in (self.plots, self.tensorboard):
                folder.mkdir(exist_ok=True)

    def verify(self, description: dict[str, Any]) -> None:
        """Raises a `UserError` if the folder holds a sweep with another description."""
        before = read_json(self.description, "record of a sweep")
        if not isinstance(before, dict) or "sweep.method" not in before:
            raise UserError(
                f"{self.description} is not a record of a sweep: restore it from a copy"
            )

        def entry(described: dict[str, Any], key: str) -> Any:
            return described.get(key, "not varied" if key.startswith("space ") else "not given")

        may_change = self.program.schema.may_change
        different = [
            f"{key} is {entry(before, key)} in the folder and {entry(description, key)} now"
            for key in dict.fromkeys([*before, *description])
            if before.get(key) != description.get(key) and may_change(key) != MayChange.ALWAYS
        ]
        if different:
            raise UserError(
                f"the workdir {self.path} holds another sweep: {'; '.join(different)}. Give "
                "another --workdir, or --overwrite to remove that sweep"
            )

    def _clear(self) -> None:
        for pattern in _OURS:
            for path in self.path.glob(pattern):
                remove(path)

    def close(self) -> None:
        """Unlocks the folder, so that another process can use it."""
        if self._lock is not None:
            if self._fresh and not self._begun:
                self._clear()  # files that keras-tuner already made
            self._lock.release(used=self._begun)
            self._lock = None


def describe(sweep: Sweep, config: ml_collections.ConfigDict, text: str) -> dict[str, Any]:
    """Returns the flat description of a sweep, with one entry per property.

    Args:
        sweep: the sweep.
        config: the configuration that the trials change.
        text: str. The fingerprint of the data.
    """
    found = sweep.describe()
    space = found.pop("space")
    described = {f"sweep.{name}": value for name, value in found.items()}
    described |= {f"space {key}": text for key, text in space.items()}
    for key in flat_keys(config):
        value = get(config, key)
        described[key] = list(value) if isinstance(value, tuple) else value
    return {**described, "text": text}
