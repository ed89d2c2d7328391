"""Writes and reads checkpoints that are either complete or absent.

A checkpoint is a folder, such as `step-00000120/`. It holds the tensors (`tf.train.Checkpoint`),
`progress.json`, `written_by.json` with the version of Keras, further files of the caller, and
`manifest.json` with the size and hash of each file. The folder is written under a temporary name,
flushed to the disk and renamed in one step. A checkpoint is compared with its manifest before it is
used. If a file is damaged or cut off, the previous checkpoint is used instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfwd import _keras
from tfwd.runs.errors import UserError, as_user_error, reason
from tfwd.runs.storage.file_access import read_json, remove

_NAME = re.compile(r"step-([0-9]{8,18})")
_MANIFEST = "manifest.json"
_PROGRESS = "progress.json"
_INDEX = "tensors.index"
_WRITTEN_BY = "written_by.json"
_WINDOWS = os.name == "nt"


class Checkpoints:
    """Checkpoints of one kind in the folder of one run.

    Args:
        folder: path of the folder. The first `save` creates it.
        check: function that raises a `UserError` if the progress of a checkpoint is not valid.

    Example:
    >>> import tempfile
    >>> checkpoints = Checkpoints(tempfile.mkdtemp())
    >>> value = tf.Variable(1.0)
    >>> _ = checkpoints.save(3, {"value": value}, {"epoch": 1})
    >>> _ = value.assign(2.0)
    >>> checkpoints.restore({"value": value})
    {'epoch': 1}
    >>> float(value)
    1.0
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        check: Callable[[dict[str, Any]], object] = lambda progress: None,
    ):
        self.folder, self._check = Path(folder), check

    def steps(self) -> list[int]:
        """Returns the steps that have checkpoints, in increasing order.

        Does not check the files.
        """
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        """Returns the folder of a checkpoint."""
        return self.folder / f"step-{step:08d}"

    def save(
        self,
        step: int,
        objects: dict[str, Any],
        progress: dict[str, Any],
        files: Mapping[str, Callable[[Path], None]] | None = None,
    ) -> Path:
        """Saves a checkpoint. Replaces a checkpoint of the same step.

        Args:
            step: int. The checkpoint's number.
            objects: arguments of `tf.train.Checkpoint`: models, optimizers, modules, variables.
            progress: dict, stored as JSON beside the tensors.
            files: further files by name. Each function writes its file at the given path.

        Returns:
            The folder of the checkpoint.

        Raises:
            UserError: the checkpoint cannot be written. Earlier checkpoints are unchanged.
        """
        final = self.path(step)
        temporary = self.folder / f".writing-{step:08d}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.recover()
            temporary.mkdir()
            tf.train.Checkpoint(**objects).write(str(temporary / "tensors"))
            (temporary / _PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
            written_by = json.dumps({"keras": _keras.GENERATION})
            (temporary / _WRITTEN_BY).write_text(written_by, encoding="utf-8")
            for name, write in (files or {}).items():
                write(temporary / name)
            facts = {path.name: _facts(path) for path in sorted(temporary.iterdir())}
            (temporary / _MANIFEST).write_text(json.dumps(facts, indent=1), encoding="utf-8")
            for path in temporary.iterdir():
                _sync(path)
            _sync(temporary)
            replaced = self.folder / f".replaced-{final.name}"
            if final.exists():
                final.rename(replaced)
            temporary.rename(final)
            _sync(self.folder)
            remove(replaced)
        except (OSError, tf.errors.OpError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            count = len(self.steps())
            intact = f"; earlier checkpoints are intact ({count})" if count else ""
            raise UserError(
                f"cannot save the checkpoint {final}: {reason(error)}{intact}"
            ) from error
        return final

    def recover(self) -> None:
        """Removes unfinished checkpoints of a process that was killed while it saved.

        Restores the name of a checkpoint that was about to be replaced.
        """
        for replaced in self.folder.glob(".replaced-*"):
            final = self.folder / replaced.name.removeprefix(".replaced-")
            if final.exists():
                remove(replaced)
            else:
                replaced.rename(final)
        for unfinished in self.folder.glob(".writing-*"):
            remove(unfinished)

    def restore(
        self, objects: dict[str, Any], say: Callable[[str], object] = print
    ) -> dict[str, Any] | None:
        """Reads the newest complete checkpoint.

        Args:
            objects: as in `save`. A subset is enough.
            say: called with a line for each checkpoint that is skipped.

        Returns:
            The progress saved with the checkpoint, or `None` if there are no checkpoints.

        Raises:
            UserError: there are checkpoints but no complete one, or the checkpoint belongs to
                another model.
        """
        step = self.newest(say)
        return None if step is None else self.read(step, objects)

    def newest(self, say: Callable[[str], object] = print) -> int | None:
        """Returns the step of the newest complete checkpoint, or `None` without checkpoints.

        Args:
            say: called with a line for each checkpoint that is skipped.

        Raises:
            UserError: there are checkpoints but no complete one.
        """
        problems = []
        for step in reversed(self.steps()):
            problem = self.problem(step)
            if problem is None:
                return step
            problems.append(f"{self.path(step)}: {problem}")
            before = [other for other in self.steps() if other < step]
            if before:
                say(f"{problems[-1]}; trying the previous checkpoint")
        if problems:
            raise UserError(
                f"no complete checkpoint is left: {'; '.join(problems)}; restore a checkpoint from "
                f"a copy, or remove {self.folder}"
            )
        return None

    def read(self, step: int, objects: dict[str, Any]) -> dict[str, Any]:
        """Reads a checkpoint without checking that it is complete. See `restore`."""
        writer = self._written_by(step)
        if writer not in (None, _keras.GENERATION):
            raise UserError(
                f"{self.path(step)} was saved on Keras {writer}, and this is Keras "
                f"{_keras.GENERATION}: only the best weights of a run can be read on both; use "
                f"Keras {writer} to resume the run or to read --checkpoint=last"
            )
        prefix = str(self.path(step) / "tensors")
        other_model = f"{self.path(step)} is a checkpoint of another model"
        with as_user_error(other_model, ValueError, AssertionError, tf.errors.OpError):
            status = tf.train.Checkpoint(**objects).read(prefix)
            status.assert_existing_objects_matched()
            status.expect_partial()
        return read_json(self.path(step) / _PROGRESS)

    def progress(self, step: int) -> dict[str, Any] | None:
        """Returns the progress saved with a checkpoint, or `None` if it cannot be read."""
        try:
            found = read_json(self.path(step) / _PROGRESS)
            if not isinstance(found, dict):
                return None
            self._check(found)
            return found
        except UserError:
            return None

    def _written_by(self, step: int) -> int | None:
        """Returns the Keras version that saved a checkpoint.

        Returns `None` for an old checkpoint, which does not record the version.

        Raises:
            UserError: the file does not have the expected form.
        """
        path = self.path(step) / _WRITTEN_BY
        if not os.path.lexists(path):
            return None
        found = read_json(path)
        if not isinstance(found, dict) or not isinstance(found.get("keras"), int):
            raise UserError(f'{path} does not have the form {{"keras": 3}}')
        return found["keras"]

    def problem(self, step: int) -> str | None:
        """Describes the problem of a checkpoint's files. Returns `None` if they are unchanged."""
        folder = self.path(step)
        if not folder.is_dir():
            return "it is a file, but a checkpoint is a folder"
        try:
            files = read_json(folder / _MANIFEST)
            for name, facts in {_INDEX: None, _PROGRESS: None, **files}.items():
                if not (folder / name).is_file():
                    return f"{name} is missing"
                if facts is None:
                    return f"{name} is not in {_MANIFEST}"
                size = (folder / name).stat().st_size
                if size != facts["bytes"]:
                    return f"{name} has {size} of {facts['bytes']} bytes"
                if _facts(folder / name) != facts:
                    return f"{name} is damaged"
        except (OSError, ValueError, TypeError, KeyError, AttributeError, UserError):
            return f"{_MANIFEST} is missing or damaged"
        try:  # the files are unchanged, but another program may have written them
            self._written_by(step)
            progress = read_json(folder / _PROGRESS)
            if not isinstance(progress, dict):
                return f"{_PROGRESS} has no progress"
            self._check(progress)
        except UserError as error:
            return str(error)
        return None

    def set_aside(self, step: int) -> None:
        """Renames a checkpoint to `broken-...`, so that it is never read."""
        broken = self.path(step).with_name(f"broken-{self.path(step).name}")
        remove(broken)
        self.path(step).rename(broken)

    def keep(self, steps: Iterable[int]) -> None:
        """Removes all checkpoints except the checkpoints of `steps`."""
        for step in set(self.steps()) - set(steps):
            remove(self.path(step))


def _facts(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _sync(path: Path) -> None:
    # Windows cannot open folders, and syncs only files that are open for writing.
    if _WINDOWS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if _WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
