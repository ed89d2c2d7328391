"""How a regular expression names variables: by their paths, the same way everywhere."""

from __future__ import annotations

import re


def matches(expression: re.Pattern[str], path: str) -> bool:
    """Whether the expression matches the whole path, or a whole end of it that follows a `/`.

    Example:

    >>> [matches(re.compile("kernel"), path) for path in ("dense/kernel", "lstm/recurrent_kernel")]
    [True, False]
    """
    parts = path.split("/")
    return any(expression.fullmatch("/".join(parts[i:])) for i in range(len(parts)))
