"""A folder that one process alone writes to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO

from tfwd.runs.errors import UserError


class Claim:
    """A folder that this process alone writes to, until it ends or `release` is called.

    Args:
        path: the folder; it is made if it is not there.
        busy: what to say if another process has it.

    Raises:
        UserError: it cannot be written, or another process has it.
    """

    def __init__(self, path: Path, busy: str):
        self._lock: IO[str] | None = None
        lock = path / ".lock"
        self._made: list[Path] = []  # what was not there, the innermost first
        try:
            missing = [each for each in (path, *path.parents) if not os.path.lexists(each)]
            path.mkdir(parents=True, exist_ok=True)
            self._made = missing if lock.exists() else [lock, *missing]
            # For reading too: a pipe of that name is not waited for.
            self._lock = os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT, 0o666), "r+")
            if not take_lock(self._lock):
                self._made = []  # it is the other one's now
                raise UserError(busy)
            if not os.path.samestat(os.fstat(self._lock.fileno()), os.stat(lock)):
                raise UserError(busy)  # the other one has just removed it
        except OSError as error:
            self._made = missing
            self.release(used=False)
            raise UserError(f"cannot write the workdir {path}: {error.strerror}") from error
        except BaseException:
            self.release(used=False)
            raise

    def release(self, used: bool = True) -> None:
        """Lets another process have the folder.

        Args:
            used: whether something was written. If not, what was made for it goes again.
        """
        for path in () if used else self._made:
            with contextlib.suppress(OSError):  # a folder that has something in it by now
                path.rmdir() if path.is_dir() else path.unlink()
        self._made = []
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def take_lock(file: IO[str]) -> bool:
    """Takes the lock, which ends with the process however it ends; True where there are none."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
