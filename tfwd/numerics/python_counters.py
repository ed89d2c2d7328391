"""Whole numbers that optimizers keep in Python instead of a variable.

In eager mode, Keras 2's Nadam counts its updates in such a number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class PythonCounters:
    """Copy of the whole numbers among the attributes of optimizers.

    Args:
        optimizers: Built optimizers that make updates, and not the ones around them.
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._kept = [
            (optimizer, {name: n for name, n in vars(optimizer).items() if type(n) is int})
            for optimizer in optimizers
        ]

    def restore(self) -> None:
        """Gives the attributes the numbers of the copy."""
        for optimizer, numbers in self._kept:
            for name, number in numbers.items():
                if vars(optimizer).get(name) != number:
                    setattr(optimizer, name, number)
