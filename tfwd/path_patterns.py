"""Regular expressions for the paths of variables and the keys of files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_SPECIAL = frozenset(".^$*+?{}[]()")  # and the vertical bar, which affects the whole pattern
_REPEATS = frozenset("*+?{")
_CHANGES = re.IGNORECASE | re.VERBOSE  # flags with which a pattern does not match its literal text


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

    An expression that begins with `/` must match the full path.

    Example:
        >>> paths = ("dense/kernel", "lstm/dense/kernel", "lstm/recurrent_kernel")
        >>> [matches(re.compile("kernel"), path) for path in paths]
        [True, True, False]
        >>> [matches(re.compile("/dense/kernel"), path) for path in paths]
        [True, False, False]
    """
    if _is_of_full_path(expression):
        return expression.fullmatch(f"/{path}") is not None
    return any(map(expression.fullmatch, path_ends(path)))


def path_ends(path: str) -> Iterator[str]:
    """Yields a path, and its parts after each `/`, the longest first."""
    while path:
        yield path
        path = path.partition("/")[2]


def _is_of_full_path(expression: re.Pattern[str]) -> bool:
    return str(expression.pattern).startswith("/")


class PatternIndex:
    r"""Index that finds all regular expressions that match a text.

    An expression is stored under the components with which each of its matches begins:
    `enc\.layer\.0\.dense` under "enc.layer.0.". An expression that does not begin with literal
    text is stored under "", and is tried for every text. So the time of a lookup depends only on
    the number of expressions under "".

    Args:
        expressions: compiled regular expressions.
    """

    def __init__(self, expressions: Iterable[re.Pattern[str]]) -> None:
        self._by_front: dict[str, list[tuple[int, re.Pattern[str]]]] = {}
        for i, expression in enumerate(expressions):
            self._by_front.setdefault(front(expression), []).append((i, expression))

    def path_matches(self, path: str) -> Iterator[tuple[int, re.Match[str]]]:
        """Yields the index of each expression and a match, as in `matches` above, longest first."""
        for end in (f"/{path}", *path_ends(path)):
            for i, match in self.matches(end):
                if _is_of_full_path(match.re) == end.startswith("/"):
                    yield i, match

    def matches(self, text: str) -> Iterator[tuple[int, re.Match[str]]]:
        """Yields the index of each expression that matches the full text, and the match."""
        for beginning in _beginnings(text):
            for i, expression in self._by_front.get(beginning, ()):
                if match := expression.fullmatch(text):
                    yield i, match


def front(expression: re.Pattern[str]) -> str:
    """Returns the components with which every match of an expression begins.

    Each component ends in `.` or `/`. If the expression is a literal text, the last component ends
    with the expression.
    """
    pattern = expression.pattern
    if not isinstance(pattern, str) or expression.flags & _CHANGES:
        return ""
    found: list[str] = []
    at, end = 0, len(pattern)
    while at < end and pattern[at] not in _SPECIAL:
        if pattern[at] == "|":
            return ""
        escaped = pattern[at] == "\\"
        if escaped and pattern[at + 1].isalnum():  # a class such as \d, or a group
            break
        found.append(pattern[at + escaped])
        at += 1 + escaped
    if at == end:
        return "".join(found)
    if "|" in pattern[at:]:
        return ""
    if pattern[at] in _REPEATS:
        del found[-1:]
    text = "".join(found)
    return text[: max(text.rfind("."), text.rfind("/")) + 1]


def _beginnings(text: str) -> Iterator[str]:
    """Yields "", each beginning of a text that ends in `.` or `/`, and the text."""
    yield ""
    last = len(text) - 1
    for i, character in enumerate(text):
        if character in "./" and i != last:
            yield text[: i + 1]
    if text:
        yield text
