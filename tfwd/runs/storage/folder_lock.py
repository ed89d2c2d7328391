"""Locks a folder, so that only one process at a time writes to it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO

from tfwd.runs.errors import UserError


class FolderLock:
    """Lock on a folder that only this process may write to, until it ends or calls `release`.

    Args:
        path: the folder. It is created if it does not exist.
        busy: the message if another process holds the lock.

    Raises:
        UserError: the folder cannot be written, or another process holds the lock.
    """

    def __init__(self, path: Path, busy: str):
        self._lock: IO[str] | None = None
        lock = path / ".lock"
        self._made: list[Path] = []  # new files and folders, the innermost first
        try:
            missing = [each for each in (path, *path.parents) if not os.path.lexists(each)]
            path.mkdir(parents=True, exist_ok=True)
            self._made = missing if lock.exists() else [lock, *missing]
            # Opened for reading and writing, so that a pipe of this name does not block.
            self._lock = os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT, 0o666), "r+")
            if not take_lock(self._lock):
                self._made = []  # the other process uses the files now
                raise UserError(busy)
            if not os.path.samestat(os.fstat(self._lock.fileno()), os.stat(lock)):
                raise UserError(busy)  # the other process has just removed the lock
        except OSError as error:
            self._made = missing
            self.release(used=False)
            raise UserError(f"cannot write the workdir {path}: {error.strerror}") from error
        except BaseException:
            self.release(used=False)
            raise

    def release(self, used: bool = True) -> None:
        """Releases the lock, so that another process can use the folder.

        Args:
            used: bool. False removes the new files and folders, because nothing was written.
        """
        for path in () if used else self._made:
            with contextlib.suppress(OSError):  # a folder that is no longer empty
                path.rmdir() if path.is_dir() else path.unlink()
        self._made = []
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def take_lock(file: IO[str]) -> bool:
    """Locks a file until the process ends. Returns False if another process holds the lock.

    Systems without locks return True.
    """
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
