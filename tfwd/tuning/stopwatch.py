"""Measures the time of a run that may be stopped and resumed, as the sum of its parts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from tfwd.atomic_files import write_atomically

FILE = "seconds.txt"
_BETWEEN_WRITES = 5.0


class Stopwatch:
    """Stopwatch that starts when it is made. Its time includes the time in the folder's file.

    Args:
        folder: path of the run folder. It need not exist yet.
        clock: function that returns the time in seconds. Tests replace it.

    Example:
    >>> import tempfile
    >>> folder, now = tempfile.mkdtemp(), [0.0]
    >>> first = Stopwatch(folder, lambda: now[0])
    >>> now[0] = 3.0
    >>> first.save()
    >>> second = Stopwatch(folder, lambda: now[0])
    >>> now[0] = 4.5
    >>> second.seconds
    4.5
    """

    def __init__(self, folder: str | os.PathLike[str], clock: Callable[[], float] = time.monotonic):
        self._path, self._clock = Path(folder) / FILE, clock
        self._before = _read(self._path)
        self._began = self._written = clock()

    @property
    def seconds(self) -> float:
        """Returns the time of all parts."""
        return self._before + self._clock() - self._began

    def tick(self) -> None:
        """Saves the time every few seconds, so that a kill loses only a few seconds."""
        if self._clock() - self._written >= _BETWEEN_WRITES:
            self.save()

    def save(self) -> None:
        """Writes the time so far."""
        self._written = self._clock()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, f"{self.seconds:.3f}\n")


def spent(trial: str | os.PathLike[str]) -> float:
    """Returns the saved seconds of all runs in a trial's folder."""
    return sum(_read(path) for path in Path(trial).glob(f"*/{FILE}"))


def _read(path: Path) -> float:
    try:
        return float(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a run that has not started
        return 0.0
