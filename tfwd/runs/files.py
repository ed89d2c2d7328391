"""A run's files: read and written whole or not at all, and one line if that cannot be.

Whatever is read from a folder goes through here, since anything may lie there: a file that was cut
off, one of another program, a pipe that would be waited for, a device without an end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tfwd import files
from tfwd.runs.errors import UserError


def write_atomically(path: str | os.PathLike[str], content: str) -> None:
    """`tfwd.files.write_atomically`, for programs.

    Raises:
        UserError: the file cannot be written. What was there is left as it was.
    """
    try:
        files.write_atomically(path, content)
    except OSError as error:
        raise UserError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


def read_bytes(path: str | os.PathLike[str], what: str = "") -> bytes:
    """The content of a file.

    Args:
        path: the file.
        what: what it is, for the message, as "the text".

    Raises:
        UserError: it cannot be read, or is a pipe or a device, which may have no end.
    """
    name = f"{what} {os.fspath(path)}".strip()
    try:
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            raise UserError(f"cannot read {name}: it is a pipe or a device; give a file")
        with open(path, "rb") as file:
            return file.read()
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or "it is larger than the memory"
        raise UserError(f"cannot read {name}: {reason}") from error


def read_json(path: str | os.PathLike[str], what: str = "file") -> Any:
    """What a file of JSON holds.

    Args:
        path: the file.
        what: what it is, for the message, as "vocabulary".

    Raises:
        UserError: it cannot be read, or is not JSON, as a file that was cut off is not.
    """
    content = read_bytes(path, f"the {what}")
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{os.fspath(path)} is not a whole {what}: {_short(error)}") from error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def remove(path: Path) -> None:
    """Removes a folder with what is in it, or whatever else has its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
