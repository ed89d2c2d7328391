"""Reads and writes complete files of a run.

Each failure is a `UserError` of one line.

Only these functions read the files of a run folder, because a path may hold anything: a file that
was cut off, a file of another program, a pipe without a writer, a device without an end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tfwd import atomic_files
from tfwd.runs.errors import UserError, as_user_error


def write_file(path: str | os.PathLike[str], content: str) -> None:
    """Writes a file in one step, with `tfwd.atomic_files.write_atomically`.

    Raises:
        UserError: the file cannot be written. The previous file is unchanged.
    """
    with as_user_error(f"cannot write {os.fspath(path)}", OSError):
        atomic_files.write_atomically(path, content)


def check_readable(path: str | os.PathLike[str], what: str = "") -> None:
    """Raises a `UserError` if a file cannot be read; see `read_bytes`."""
    read_bytes(path, what, most=0)


def read_bytes(path: str | os.PathLike[str], what: str = "", most: int = -1) -> bytes:
    """Returns the content of a file.

    Args:
        path: the file.
        what: the kind of file for the message, such as "the text".
        most: int. The maximum number of bytes to read; -1 reads the whole file.

    Raises:
        UserError: the file cannot be read, or is a pipe or a device, which may have no end.
    """
    name = f"{what} {os.fspath(path)}".strip()
    try:
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            raise UserError(f"cannot read {name}: it is a pipe or a device; give a file")
        with open(path, "rb") as file:
            return file.read(most)
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or "it is larger than the memory"
        raise UserError(f"cannot read {name}: {reason}") from error


def read_text(path: str | os.PathLike[str]) -> str:
    """Reads a UTF-8 text file. Line ends become line feeds, and a byte-order mark is dropped.

    Args:
        path: the file.

    Returns:
        The text, with at least one character that is not white space.

    Raises:
        UserError: the file is missing, a folder, a pipe, unreadable, empty, or not UTF-8. If it is
            not UTF-8, the message has the offset of the first wrong byte, counted from 0.
    """
    content = read_bytes(path, "the text")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start} "
            f"({error.reason}); convert it to UTF-8"
        ) from error
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise UserError(f"the text {path} is empty")
    return text


def read_json(path: str | os.PathLike[str], what: str = "file") -> Any:
    """Returns the content of a JSON file.

    Args:
        path: the file.
        what: the kind of file for the message, such as "vocabulary".

    Raises:
        UserError: the file cannot be read, or is not JSON because it was cut off.
    """
    content = read_bytes(path, f"the {what}")
    failure = f"{os.fspath(path)} is not a complete {what}"
    with as_user_error(failure, ValueError, RecursionError):
        return json.loads(content.decode("utf-8"))


def remove(path: Path) -> None:
    """Removes a folder with its contents, or a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
