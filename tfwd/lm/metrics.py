"""The log of a run: `metrics.jsonl`, one JSON object a line, and the same for TensorBoard.

The file is the one truth. A run that goes on from a checkpoint cuts it back to the length it had
when that was saved, and writes TensorBoard's events anew from what is left, so that neither shows
a step twice.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfwd.lm.errors import UserError


class Metrics:
    """Writes records; each has a `kind` and a `step`.

    The kinds are "train", "valid", "test", "failure" and "gradient".

    Args:
        path: the file.
        keep_bytes: how much of the file there is stays.
        tensorboard: the folder for TensorBoard's events; `None` for none.

    Raises:
        UserError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "metrics.jsonl")
        >>> with Metrics(path) as metrics:
        ...     metrics.write({"kind": "valid", "step": 7, "loss": 1.5})
        >>> read_metrics(path)
        [{'kind': 'valid', 'step': 7, 'loss': 1.5}]
    """

    def __init__(
        self, path: str | os.PathLike[str], keep_bytes: int = 0, tensorboard: Path | None = None
    ):
        self.path = Path(path)
        self._writer = None
        try:
            self._file = open(self.path, "ab")  # noqa: SIM115 (closed by __exit__)
            self._file.truncate(min(keep_bytes, self._file.tell()))
            self._file.seek(0, os.SEEK_END)
            if tensorboard is not None:
                for old in tensorboard.glob("events.out.tfevents.*"):
                    old.unlink()
                self._writer = tf.summary.create_file_writer(str(tensorboard))
                for record in read_metrics(self.path):
                    self._show(record)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def write(self, record: dict[str, Any]) -> None:
        """Adds a record. A number that is not finite becomes null: JSON has none."""
        record = _finite(record)
        try:
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error
        self._show(record)

    def sync(self) -> int:
        """Pushes what was written to the disk; returns the file's length in bytes."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error
        if self._writer is not None:
            self._writer.flush()
        return self._file.tell()

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()

    def _show(self, record: dict[str, Any]) -> None:
        if self._writer is None:
            return
        with self._writer.as_default(step=record["step"]):
            for name, value in record.items():
                if name == "norms":
                    for path, norm in value.items():
                        if norm is not None:
                            tf.summary.scalar(f"norm/{path}", norm)
                elif isinstance(value, float):
                    tf.summary.scalar(f"{record['kind']}/{name}", value)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`; a last line that was not finished is left out."""
    with open(path, "rb") as file:
        return [json.loads(line) for line in file if line.endswith(b"\n")]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
