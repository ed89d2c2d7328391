"""Objects that may turn out to be the same one."""

from __future__ import annotations

from typing import Any, TypeVar

_Kind = TypeVar("_Kind", bound="Joinable")


class Joinable:
    """An object that may turn out to be the same as another one of its kind."""

    def __init__(self) -> None:
        self._same: Any = None

    def find(self: _Kind) -> _Kind:
        """Returns the one object that stands for all that are the same."""
        found = self
        while found._same is not None:
            found = found._same
        return found

    def become_one_with(self, other: Joinable) -> bool:
        """Makes another object the same. Returns False if it was the same before."""
        mine, others = self.find(), other.find()
        if mine is others:
            return False
        others._same = mine
        return True
