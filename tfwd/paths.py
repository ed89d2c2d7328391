"""Regular expressions that choose variables by their paths, the same way everywhere."""

from __future__ import annotations

import re


def compiled(pattern: str, what: str) -> re.Pattern[str]:
    """Returns the compiled pattern.

    Args:
        pattern: a regular expression.
        what: the pattern and what it is for, the beginning of the error's message.

    Raises:
        ValueError: if it is not a regular expression.
    """
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"{what} is not a regular expression: {error}") from error


def matches(expression: re.Pattern[str], path: str) -> bool:
    """Returns True if the expression matches the whole path, or a whole end of it that follows a `/`.

    Example:

    >>> [matches(re.compile("kernel"), path) for path in ("dense/kernel", "lstm/recurrent_kernel")]
    [True, False]
    """
    parts = path.split("/")
    return any(expression.fullmatch("/".join(parts[i:])) for i in range(len(parts)))
