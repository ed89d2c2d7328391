"""`UserError`, for what a user of the programs got wrong, and suggestions of near names.

The programs print it as a single line, ``error: <message>``, and end with exit code 1. Anything
else that is raised is a fault of the code and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A problem with what the user gave: a flag, a config value, a text or a run's folder.

    The message is one line that says what was wrong, where, the value, and what would be right.

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
        name: what was given.
        names: what there is.
        count: at most so many.

    Returns:
        The names that are similar to `name`; an empty list when none is.

    Example:

    >>> suggest("momentun", ["momentum", "nesterov"])
    ['momentum']
    """
    scored = []
    for candidate in names:
        matcher = difflib.SequenceMatcher(None, name.lower(), candidate.lower(), autojunk=False)
        scored.append((matcher.ratio(), candidate))
    best = max(scored, default=(0.0, ""))[0]
    # Near in themselves, and not far behind the best: dotted keys are all somewhat alike.
    close = [pair for pair in scored if pair[0] >= max(0.6, best - 0.15)]
    return [name for _, name in sorted(close, key=lambda pair: -pair[0])[:count]]
