"""Writes a file so that it is whole or not there at all.

A run can be killed at any moment. A file is therefore written beside its place and moved over it
in one step: whoever reads it sees the old content or the new, never a part.
"""

from __future__ import annotations

import os
import tempfile


def write_atomically(path: str | os.PathLike[str], content: str) -> None:
    """Writes `content` to the file `path` as UTF-8, in one step.

    Args:
        path: the file; what it held before is replaced. Its folder must exist.
        content: the text.

    Raises:
        OSError: the file cannot be written. What was there is left as it was.

    Example:

    >>> import pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp(), "note.txt")
    >>> write_atomically(file, "whole")
    >>> file.read_text()
    'whole'
    """
    path = os.fspath(path)
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(
            dir=os.path.dirname(path) or ".", prefix=f".{os.path.basename(path)}."
        )
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files that only the owner reads
        os.replace(temporary, path)
        temporary = None
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.remove(temporary)


def _umask() -> int:
    """Returns the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
