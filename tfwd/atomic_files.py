"""Writes a file atomically: it has either its old content or all of its new content.

A run can be killed at any moment. So the content is written to a temporary file in the same folder.
The temporary file then replaces the file in one step.
"""

from __future__ import annotations

import os
import tempfile


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes `content` to the file `path`, in one step.

    Args:
        path: Path of the file. Its old content is replaced. Its folder must exist.
        content: str or bytes. New content. A string is written as UTF-8.

    Raises:
        OSError: If the file cannot be written. The file then keeps its old content.

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
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, readable_mode())  # mkstemp creates files that only the owner can read
        os.replace(temporary, path)
        temporary = None
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.remove(temporary)


def readable_mode() -> int:
    """Returns the mode of a file that `open` creates. The umask can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
