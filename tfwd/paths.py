"""Regular expressions that select variables by their paths, with one meaning everywhere."""

from __future__ import annotations

import re


def compiled(pattern: str, what: str) -> re.Pattern[str]:
    """Compiles a pattern.

    Args:
        pattern: Regular expression.
        what: The pattern and its purpose, for the beginning of the error message.

    Raises:
        ValueError: If it is not a regular expression.
    """
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"{what} is not a regular expression: {error}") from error


def matches(expression: re.Pattern[str], path: str) -> bool:
    """Returns True if the expression matches the full path or its last components.

    Example:
        >>> paths = ("dense/kernel", "lstm/recurrent_kernel")
        >>> [matches(re.compile("kernel"), path) for path in paths]
        [True, False]
    """
    parts = path.split("/")
    return any(expression.fullmatch("/".join(parts[i:])) for i in range(len(parts)))
