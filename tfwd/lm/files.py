"""Writing a run's files, whole or not at all, and saying it if that cannot be."""

from __future__ import annotations

import os

from tfwd import files
from tfwd.lm.errors import UserError


def write_atomically(path: str | os.PathLike[str], content: str) -> None:
    """`tfwd.files.write_atomically`, for programs.

    Raises:
        UserError: the file cannot be written. What was there is left as it was.
    """
    try:
        files.write_atomically(path, content)
    except OSError as error:
        raise UserError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error
