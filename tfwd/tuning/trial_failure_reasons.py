"""Stores the reason why a trial failed, and returns it in one line."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from keras_tuner.engine.trial import Trial

from tfwd.atomic_files import write_atomically

FILE = "error.txt"  # in a trial's folder: the traceback of a failed trial


def store(trial: Trial, folder: str | os.PathLike[str]) -> None:
    """Writes the traceback of a failed trial into its folder, where the chief can read it.

    Does nothing if the trial has not failed.
    """
    if trial.message:
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_atomically(Path(folder) / FILE, trial.message)


def reason(trial: Trial, folder: str | os.PathLike[str]) -> str:
    """Returns why a trial failed, in one line, or "" if the reason is not known.

    Args:
        trial: the trial.
        folder: path of the trial's folder, with the traceback if another process ran the trial.
    """
    try:
        text = trial.message or (Path(folder) / FILE).read_text(encoding="utf-8")
    except OSError:
        return ""
    return one_line(text)


def one_line(message: str | None) -> str:
    r"""Returns the exception of a traceback that keras-tuner stored, in one line.

    Example:
    >>> one_line('Traceback (...):\n  File "a.py", line 1, in f\n    g()\nValueError: bad\nmore')
    'ValueError: bad'
    >>> one_line("keras_tuner.src.errors.FailedTrialError: val_loss is not finite")
    'val_loss is not finite'
    """
    lines = re.sub(r"\x1b\[[\d;]*m", "", message or "").strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    rest = lines[frames[-1] + 1 :] if frames else lines
    # Below the last frame is its line of code, then the exception, which is not indented.
    below = itertools.dropwhile(lambda line: not line[:1].strip() or line[:9] == "Traceback", rest)
    found = [line.strip() for line in below if line.strip()]
    if not found:
        return ""
    first = found[0]
    if len(found) > 1 and first.endswith("in user code:"):  # AutoGraph's frames come between
        first = found[-1]
    elif len(found) > 1 and "Exception encountered when calling" in first:  # Keras's first line
        first = f"{first.partition(':')[0]}: {found[1]}"
    name, _, text = first.partition(": ")
    # Omit the class if tfwd raised the exception. Keep it for a crash, where it is informative.
    return text if text and name.endswith("FailedTrialError") else _without_module(first)


def _without_module(line: str) -> str:
    return re.sub(r"^(?:\w+\.)+(?=\w+(?::|$))", "", line)
