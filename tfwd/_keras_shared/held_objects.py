"""Lists what an object holds: the values of its attributes, and the entries of lists and dicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def held_by(owner: Any) -> Iterator[Any]:
    """Yields the values of an object's attributes. Lists, tuples and dicts yield their entries."""
    for value in vars(owner).values():
        yield from _entries(value)


def _entries(value: Any) -> Iterator[Any]:
    if not isinstance(value, (list, tuple, dict)):
        yield value
        return
    for entry in list(value.values() if isinstance(value, dict) else value):
        yield from _entries(entry)
