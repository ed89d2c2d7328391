"""`UserError` for mistakes of a program's user, one-line reasons, and suggestions of names.

The programs print a `UserError` as a single line, ``error: <message>``, and end with exit code 1.
Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterable, Iterator


class UserError(Exception):
    """Problem with the user's input: a flag, a config value, a text or a run folder.

    The message is one line. It says what is wrong, where, the value, and what was expected.

    Example:
    >>> from tfwd.runs.errors import UserError
    >>> raise UserError("data.level='words': give word or char")
    Traceback (most recent call last):
    ...
    tfwd.runs.errors.UserError: data.level='words': give word or char
    """


def reason(error: BaseException) -> str:
    """Returns the reason of an exception in one line of at most 300 characters."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = getattr(error, "message", None) or str(error)  # errors of TensorFlow have `message`
    text = re.sub(r"\{\{\w+ [^}]*\}\}", "", text)  # removes TensorFlow's names of nodes
    return " ".join(text.split())[:300] or type(error).__name__


def listing(folder: str) -> str:
    """Returns the first eight names in a folder, for a message; "no files" if it is empty."""
    return ", ".join(sorted(os.listdir(folder))[:8]) or "no files"


@contextlib.contextmanager
def as_user_error(what: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns exceptions of the body into a `UserError` of one line: `what`, and the reason.

    Args:
        what: str. The failure, such as "cannot write FILE".
        *errors: types of exceptions. Other exceptions pass unchanged.

    Raises:
        UserError: the body raised one of `errors`, which is the cause of the `UserError`.

    Example:
    >>> with as_user_error("cannot read the number", ValueError):
    ...     int("seven")
    Traceback (most recent call last):
    ...
    tfwd.runs.errors.UserError: cannot read the number: invalid literal for int() with base 10: \
'seven'
    """
    try:
        yield
    except errors as error:
        raise UserError(f"{what}: {reason(error)}") from error


def suggest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Returns the names closest to `name`, best first, for an error message.

    Args:
        name: the given name.
        names: the known names.
        count: the largest number of names to return.

    Returns:
        The names that are similar to `name`. The list is empty if no name is similar.

    Example:
    >>> suggest("momentun", ["momentum", "nesterov"])
    ['momentum']
    """
    scored = []
    for candidate in names:
        matcher = difflib.SequenceMatcher(None, name.lower(), candidate.lower(), autojunk=False)
        scored.append((matcher.ratio(), candidate))
    best = max(scored, default=(0.0, ""))[0]
    # A candidate must be similar, and nearly as similar as the best: all dotted keys are somewhat
    # alike.
    close = [pair for pair in scored if pair[0] >= max(0.6, best - 0.15)]
    return [name for _, name in sorted(close, key=lambda pair: -pair[0])[:count]]
