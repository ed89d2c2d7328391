"""`UserError`, for mistakes of a program's user, and suggestions of similar names.

The programs print a `UserError` as a single line, ``error: <message>``, and end with exit code 1.
Any other exception is a fault of the code and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
