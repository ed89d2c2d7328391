"""Folder of a run: its files, its lock, and the check that it belongs to this run.

config.json  vocabulary.json     configuration and vocabulary (the program names the second file)
checkpoints/                     the last checkpoints: model, optimizer, state
best/                            the weights with the lowest validation loss, for Keras 2 and 3
metrics.jsonl  tensorboard/      the log of the training
report/                          the results
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_collections

from tfwd.runs.errors import UserError, as_user_error
from tfwd.runs.interfaces import StoredProgram, Vocabulary
from tfwd.runs.settings import config as configs
from tfwd.runs.storage import weight_files
from tfwd.runs.storage.checkpoint import Checkpoints
from tfwd.runs.storage.folder_lock import FolderLock
from tfwd.runs.storage.progress import Progress

_WEIGHTS = "weights.npz"


class RunFolder:
    """Paths, lock and checkpoints in the folder of a run.

    Args:
        path: path of the folder. It need not exist.
        program: the program of the run.
    """

    def __init__(self, path: str | os.PathLike[str], program: StoredProgram):
        self.path, self.program = Path(path), program
        self.config = self.path / "config.json"
        self.vocabulary = self.path / program.vocabulary_file
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.report = self.path / "report"
        self.checkpoints = Checkpoints(self.path / "checkpoints", check=Progress.from_json)
        self.best = Checkpoints(self.path / "best", check=Progress.from_json)
        self._lock: FolderLock | None = None
        self._run: tuple[ml_collections.ConfigDict, Vocabulary] | None = None
        self._begun = False

    def open(self, config: ml_collections.ConfigDict, vocabulary: Vocabulary) -> None:
        """Locks the folder, and checks that its contents belong to this configuration.

        Nothing is written before `begin`. A rejected run leaves no files.

        Raises:
            UserError: the folder cannot be written, another process trains in it, or it holds a run
                with another configuration or vocabulary.
        """
        busy = f"another process is training in the workdir {self.path}"
        self._lock, self._begun = FolderLock(self.path, busy), False
        try:
            for folder in (
                self.report,
                self.tensorboard,
                self.checkpoints.folder,
                self.best.folder,
            ):
                if os.path.lexists(folder) and not folder.is_dir():
                    raise UserError(f"{folder} is a file, but a run needs a folder; remove it")
            summary = self.report / "summary.json"  # written last, when the training is finished
            if summary.is_dir():
                raise UserError(f"{summary} is a folder, but a run needs a file; remove it")
            # A start that failed before its first checkpoint left nothing to resume from.
            if self.config.exists() and (self.checkpoints.steps() or self.best.steps()):
                self._verify(config, vocabulary)
            self._run = config, vocabulary
        except BaseException:
            self.close()
            raise

    def follow(self, config: ml_collections.ConfigDict, vocabulary: Vocabulary) -> None:
        """Uses a folder that another process writes to. Locks and writes nothing."""
        self._run = config, vocabulary

    def begin(self) -> None:
        """Writes the configuration and the vocabulary. From then on the folder belongs to this run.

        Raises:
            UserError: the folder cannot be written.
        """
        assert self._run is not None
        config, vocabulary = self._run
        new = [path for path in (self.vocabulary, self.config) if not path.exists()]
        try:
            with as_user_error(f"cannot write the workdir {self.path}", OSError):
                vocabulary.save(self.vocabulary)
                configs.save(config, self.config)  # last, because this file marks a run
                self._begun = True
                for folder in (self.report, self.tensorboard):
                    folder.mkdir(exist_ok=True)
        finally:
            for path in () if self._begun else new:
                path.unlink(missing_ok=True)

    def _verify(self, config: ml_collections.ConfigDict, vocabulary: Vocabulary) -> None:
        schema = self.program.schema
        different = schema.differences(schema.load(self.config, to_train=False), config)
        if different:
            raise UserError(
                f"the workdir {self.path} holds a run with another configuration: "
                f"{'; '.join(different)}. Give another --workdir, or the same values"
            )
        before = self.program.load_vocabulary(self.vocabulary)
        if before.fingerprint() != vocabulary.fingerprint():
            raise UserError(
                f"the workdir {self.path} holds a run with another vocabulary: "
                f"{len(before)} {self.program.entries} in the folder, {len(vocabulary)} in the "
                "data. Give another --workdir, or the same data"
            )

    def restore(self, objects: dict[str, Any], data: str, say: Callable[[str], object]) -> Progress:
        """Reads the newest complete checkpoint, if there is one.

        Args:
            objects: as in `Checkpoints.restore`.
            data: str. The fingerprint of the data.
            say: called with a line for each checkpoint that is skipped.

        Returns:
            The progress of the run; the initial progress if there are no checkpoints.

        Raises:
            UserError: the checkpoint belongs to another model or other data, or no checkpoint is
                complete.
        """
        self.checkpoints.recover()
        self.best.recover()
        found = self.checkpoints.restore(objects, say=say)
        fingerprint = self._run[1].fingerprint() if self._run else ""
        if found is None:
            return Progress(data=data, vocabulary=fingerprint)
        progress = Progress.from_json(found)
        progress.vocabulary = fingerprint
        if progress.data != data:
            raise UserError(
                f"the data is not the data that the run in {self.path} was trained on; "
                "give another --workdir, or the same data"
            )
        for step in self.checkpoints.steps():
            if step > progress.step:  # skipped as damaged
                self.checkpoints.set_aside(step)
        return progress

    def read(self, objects: dict[str, Any], step: int) -> Progress:
        """Reads the checkpoint of the step that the chief chose in `restore`.

        Raises:
            UserError: this worker cannot read it.
        """
        problem = self.checkpoints.problem(step)
        if problem:
            raise UserError(f"the checkpoint {self.checkpoints.path(step)}: {problem}")
        return Progress.from_json(self.checkpoints.read(step, objects))

    def save(self, objects: dict[str, Any], progress: Progress, keep: int) -> None:
        """Saves a checkpoint, and removes all checkpoints except the last `keep`.

        Raises:
            UserError: the checkpoint cannot be written. No checkpoint was removed.
        """
        self.checkpoints.save(progress.step, objects, progress.to_json())
        kept = self.checkpoints.steps()[-keep:]
        self.checkpoints.keep(kept)
        # The best weights that any kept checkpoint refers to must stay.
        records = (self.checkpoints.progress(step) or {} for step in kept)
        self.best.keep(record.get("best_step", 0) for record in records)

    def save_best(self, model: Any, progress: Progress) -> None:
        """Saves the best weights so far. Also writes a file that both versions of Keras can read.

        Raises:
            UserError: the weights cannot be written.
        """
        named, name = self.program.named_weights(model), self.program.model_name
        files = {_WEIGHTS: lambda path: weight_files.save(path, named, name)}
        self.best.save(progress.step, {"model": model}, progress.to_json(), files)

    def restore_best(self, model: Any, say: Callable[[str], object]) -> dict[str, Any] | None:
        """Reads the newest complete best weights, from either version of Keras.

        Args:
            model: the model that gets the weights.
            say: called with a line for each checkpoint that is skipped.

        Returns:
            The progress saved with the weights, or `None` if there are no weights.

        Raises:
            UserError: there are checkpoints but no complete one, or the checkpoint belongs to
                another model.
        """
        step = self.best.newest(say)
        if step is None:
            return None
        path = self.best.path(step) / _WEIGHTS
        if not path.exists():  # an old version of tfwd did not write this file
            return self.best.read(step, {"model": model})
        weight_files.load(path, self.program.named_weights(model), self.program.model_name)
        return self.best.progress(step)

    def close(self) -> None:
        """Unlocks the folder, so that another process can use it."""
        if self._lock is not None:
            self._lock.release(used=self._begun)
            self._lock = None
