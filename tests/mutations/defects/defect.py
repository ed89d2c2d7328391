"""A defect to plant, and the tests that must find it."""

from __future__ import annotations

from typing import NamedTuple


class Defect(NamedTuple):
    """A defect.

    Attributes:
        what: the effect of the defect, in words.
        file: path of the source in the repository.
        old: a text that occurs once in the source.
        new: the text that replaces it.
        tests: pytest's arguments, which name the tests that may find it.
        slow: True if a slow test that `.ci/run` names finds it. Otherwise `make test` finds it.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    slow: bool = False


def conformance(file: str, words: str) -> tuple[str, ...]:
    """Returns tests of the table whose names have all the words."""
    return (f"tests/conformance/test_{file}.py", "-k", words)
