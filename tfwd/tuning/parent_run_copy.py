"""Starts a run of a promoted trial from the end of another trial's run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tfwd.tuning import stopwatch


def copy_parent_run(
    parent: str | os.PathLike[str], folder: str | os.PathLike[str], *excluded: str
) -> None:
    """Copies the folder of a run, unless the new run has begun already.

    Args:
        parent: folder of the run that was promoted.
        folder: folder of the new run. A stop during the copy leaves no such folder.
        *excluded: patterns of files that are not copied. The file with the parent's time is not
            copied either.
    """
    new = Path(folder)
    if new.exists():  # it was started before, and stopped
        return
    copied = new.with_name(f".{new.name}.new")
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(parent, copied, ignore=shutil.ignore_patterns(stopwatch.FILE, *excluded))
    copied.rename(new)
