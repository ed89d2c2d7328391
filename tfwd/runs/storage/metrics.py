"""Writes the metrics of a run: `metrics.jsonl`, one JSON object per line, and TensorBoard events.

The file is the single source of truth. A run that resumes cuts the file back to its length at the
checkpoint, and writes TensorBoard's events again. No step therefore occurs twice in them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfwd.runs.errors import as_user_error
from tfwd.runs.storage.file_access import read_bytes


class Metrics:
    """Writer of a run's metrics; each record has a `kind` and a `step`.

    The kinds are "train", "valid", "test", "failure" and "gradient".

    Args:
        path: path of the file.
        keep_bytes: int. The number of bytes of the existing file to keep.
        tensorboard: the folder for TensorBoard's events; `None` writes no events.
        say: called with a line if a part of the file is missing, or a line is not a record.

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
        self,
        path: str | os.PathLike[str],
        keep_bytes: int = 0,
        tensorboard: Path | None = None,
        say: Callable[[str], object] = print,
    ):
        self.path = Path(path)
        self._writer = None
        with self._writing():
            kept = self._kept(keep_bytes, say)
            self._file = open(self.path, "ab")  # noqa: SIM115 (closed by __exit__)
            self._file.truncate(kept)
            self._file.seek(0, os.SEEK_END)
            if tensorboard is not None:
                for old in tensorboard.glob("events.out.tfevents.*"):
                    old.unlink()
                self._writer = tf.summary.create_file_writer(str(tensorboard))
                for record in read_metrics(self.path):
                    self._show(record)

    def _kept(self, most: int, say: Callable[[str], object]) -> int:
        """Returns the length to keep: the complete lines within the first `most` bytes."""
        if not os.path.lexists(self.path) and not most:
            return 0
        content = b""
        if os.path.lexists(self.path):
            content = read_bytes(self.path, "the log")
        kept = content[:most]
        kept = kept[: kept.rfind(b"\n") + 1]
        if len(kept) < most:
            say(
                f"{self.path} has {len(kept)} of its {most} bytes; the curves lack the missing part"
            )
        wrong = [n for n, line in enumerate(kept.splitlines(), 1) if _record(line) is None]
        if wrong:
            say(f"{self.path}, line {wrong[0]} is not a record of a run; the curves omit it")
        return len(kept)

    def _writing(self) -> AbstractContextManager[None]:
        return as_user_error(f"cannot write {self.path}", OSError, tf.errors.OpError)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def write(self, record: dict[str, Any]) -> None:
        """Adds a record. Writes a non-finite number as null, because JSON has no such number."""
        record = _finite(record)
        with self._writing():
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
            self._show(record)

    def text(self, name: str, text: str, step: int) -> None:
        """Shows a text in TensorBoard, without formatting."""
        if self._writer is not None:
            with self._writer.as_default(step=step):
                tf.summary.text(name, f"```\n{text}\n```")

    def sync(self) -> int:
        """Flushes the file to the disk. Returns its length in bytes."""
        with self._writing():
            self._file.flush()
            os.fsync(self._file.fileno())
            if self._writer is not None:
                self._writer.flush()
        return self._file.tell()

    def close(self) -> None:
        """Closes the files."""
        with contextlib.suppress(OSError, tf.errors.OpError):  # a full disk was reported before
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
    """Returns the records of a `metrics.jsonl`.

    Skips an incomplete last line, and any line that is not a record.

    Raises:
        UserError: the file cannot be read.
    """
    lines = read_bytes(path, "the log").split(b"\n")[:-1]
    return [record for record in map(_record, lines) if record is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        return None
    norms = found.get("norms", {})
    numbers = [*found.values(), *(norms.values() if isinstance(norms, dict) else [[]])]
    plain = all(each is None or isinstance(each, (int, float, str)) or each is norms
                for each in numbers)  # fmt: skip
    return found if plain and isinstance(found.get("step"), int) else None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
