"""Which variables are decayed, how much, and why.

The rules are made once, when the optimizer meets its variables, and the same rules print the table
that a user reads to see whether the patterns say what was meant.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfwd import _keras
from tfwd._keras import updates as _keras_updates
from tfwd.paths import compiled, matches


class Choice(NamedTuple):
    """What the rules say of one variable.

    Attributes:
        multiplier: times the decay; 0 is none.
        reason: the pattern that said so.
    """

    multiplier: float
    reason: str


class DecayRow(NamedTuple):
    """A line of the table.

    Attributes:
        path: the variable's.
        shape: the variable's.
        decay: the share of the variable that an update takes away now: d * m * s.
        multiplier: m.
        reason: which pattern chose it.
    """

    path: str
    shape: tuple[int, ...]
    decay: float
    multiplier: float
    reason: str


class DecayTable(list):
    """The rows of a table of decays; `str` and `print` show it in columns."""

    def __str__(self) -> str:
        cells = [("variable", "shape", "decay an update", "why")]
        for row in self:
            shape = "x".join(map(str, row.shape)) or "scalar"
            cells.append((row.path, shape, f"{row.decay:.6g}" if row.decay else "-", row.reason))
        widths = [max(len(line[i]) for line in cells) for i in range(3)]
        lines = [
            f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}" for a, b, c, d in cells
        ]
        return "\n".join(lines)


class DecayRules:
    """`include`, `exclude` and `multipliers`, checked and compiled.

    Args:
        owner: whose they are, for error messages.
        include: patterns; `None` is every variable.
        exclude: patterns; they win over `include`.
        multipliers: pattern -> factor; the first that matches a variable counts.

    Raises:
        TypeError: what should be patterns, or a dict from patterns to factors, is something else.
        ValueError: a pattern is not a regular expression, or a factor is not a finite number of at
            least 0.

    Attributes:
        chosen: what was chosen for the variables of an optimizer, by their keys.
    """

    def __init__(
        self,
        owner: str,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        multipliers: Mapping[str, float] | None = None,
    ) -> None:
        self.owner = owner
        self.include = _patterns(owner, "include", include)
        self.exclude = _patterns(owner, "exclude", exclude)
        self.multipliers = _factors(owner, multipliers)
        if self.include == []:
            raise ValueError(f"{owner}: include=[] decays nothing; None means every variable")
        self.chosen: dict[Any, Choice] = {}
        self._compiled = {
            (kind, pattern): compiled(pattern, f"{owner}: {kind} pattern {pattern!r}")
            for kind in ("include", "exclude", "multipliers")
            for pattern in getattr(self, kind) or ()
        }

    def choose(self, variables: Sequence[Any]) -> list[Choice]:
        """What the rules say of each variable.

        Raises:
            ValueError: a pattern matches none of the variables; the message lists their paths.
        """
        paths = [_keras.variables.path(variable) for variable in variables]
        for (kind, pattern), expression in self._compiled.items():
            if not any(matches(expression, path) for path in paths):
                there = ", ".join(paths) if paths else "there are none"
                raise ValueError(
                    f"{self.owner}: {kind} pattern {pattern!r} matches no variable; their paths: "
                    f"{there}"
                )
        return [self._choice(v, path) for v, path in zip(variables, paths, strict=True)]

    def _choice(self, variable: Any, path: str) -> Choice:
        if _keras_updates.is_overwritten(variable):
            return Choice(0.0, "its gradient is its new value")
        if "float" not in _keras.variables.dtype_name(variable):
            return Choice(0.0, f"of dtype {_keras.variables.dtype_name(variable)}")
        if (pattern := self._first("exclude", path)) is not None:
            return Choice(0.0, f"exclude {pattern!r}")
        reason = "every variable"
        if self.include is not None:
            pattern = self._first("include", path)
            if pattern is None:
                return Choice(0.0, "no include pattern matches")
            reason = f"include {pattern!r}"
        pattern = self._first("multipliers", path)
        if pattern is None or self.multipliers is None:
            return Choice(1.0, reason)
        factor = float(self.multipliers[pattern])
        return Choice(factor, f"{reason}, times {factor:g} by {pattern!r}")

    def _first(self, kind: str, path: str) -> str | None:
        for pattern in getattr(self, kind) or ():
            if matches(self._compiled[kind, pattern], path):
                return pattern
        return None


def _patterns(owner: str, kind: str, given: Any) -> list[str] | None:
    if given is None or isinstance(given, str):
        return given if given is None else [given]
    if not isinstance(given, Sequence):
        raise TypeError(
            f"{owner}: {kind}={given!r}: give a regular expression, a list of them, or None"
        )
    return list(given)


def _factors(owner: str, given: Any) -> dict[str, float] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{owner}: multipliers={given!r}: give a dict from regular expressions to factors, as "
            "{'embedding': 0.1}, or None"
        )
    for pattern, factor in given.items():
        number = isinstance(factor, numbers.Real) and not isinstance(factor, bool)
        if not number or not 0 <= factor < float("inf"):
            raise ValueError(
                f"{owner}: multipliers[{pattern!r}]={factor!r}: give a finite number of at least 0"
            )
    return {pattern: float(factor) for pattern, factor in given.items()}
