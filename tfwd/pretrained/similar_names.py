"""Hints in error messages: the names that are most similar to a wrong name."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable

SHOWN = 10  # problems of one kind in a message


def hints(names: Iterable[str]) -> Callable[[str], str]:
    """Returns a function from a wrong name to a hint with the most similar names.

    A hint compares the wrong name with all names. Only the first `SHOWN` wrong names get a hint,
    because a message shows no more. The time is therefore linear in the number of keys, even if all
    keys are wrong.
    """
    candidates, given = list(names), itertools.count()

    def hint(name: str) -> str:
        if next(given) >= SHOWN:
            return ""
        found = difflib.get_close_matches(name, candidates, n=2, cutoff=0.5)
        return f"; nearest: {', '.join(found)}" if found else ""

    return hint
