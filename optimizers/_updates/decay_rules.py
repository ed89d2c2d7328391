"""Rules that select which variables are decayed, how much, and why.

The optimizer applies the rules once, when it first sees its variables. They also print a table, so
that a user can check the patterns.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfwd import _keras
from tfwd._keras import update_interception
from tfwd.path_patterns import compiled, matches


class Choice(NamedTuple):
    """The result of the rules for one variable.

    Attributes:
        multiplier: Factor of the decay. 0 means no decay.
        reason: Reason for the multiplier, such as the pattern that matched.
    """

    multiplier: float
    reason: str


class DecayRow(NamedTuple):
    """A row of the decay table.

    Attributes:
        path: Path of the variable.
        shape: Shape of the variable.
        decay: Fraction of the variable that an update removes at the current step: d * m * s.
        multiplier: The factor m.
        reason: Reason for the multiplier, such as the pattern that matched.
    """

    path: str
    shape: tuple[int, ...]
    decay: float
    multiplier: float
    reason: str


class DecayTable(list):
    """A list of decay rows. `str` and `print` show it as a table."""

    def __str__(self) -> str:
        cells = [("variable", "shape", "decay per update", "why")]
        for row in self:
            shape = "x".join(map(str, row.shape)) or "scalar"
            cells.append((row.path, shape, f"{row.decay:.6g}" if row.decay else "-", row.reason))
        widths = [max(len(line[i]) for line in cells) for i in range(3)]
        lines = [
            f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}" for a, b, c, d in cells
        ]
        return "\n".join(lines)


class DecayRules:
    """The rules `include`, `exclude` and `multipliers`, checked and compiled.

    Args:
        owner: Name of the optimizer, for error messages.
        include: Patterns. Default None, for every variable.
        exclude: Patterns. They have precedence over `include`. Default None.
        multipliers: dict from a pattern to a factor. The first matching pattern applies. Default
            None.

    Raises:
        TypeError: If patterns or multipliers have a wrong type.
        ValueError: If a pattern is not a regular expression, or if a factor is negative or not
            finite.

    Attributes:
        chosen: dict from the key of a variable to the choice for the variable.
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
            raise ValueError(f"{owner}: include=[] decays nothing: pass None for all variables")
        self.chosen: dict[Any, Choice] = {}
        self._compiled = {
            (kind, pattern): compiled(pattern, f"{owner}: {kind} pattern {pattern!r}")
            for kind in ("include", "exclude", "multipliers")
            for pattern in getattr(self, kind) or ()
        }

    def choose(self, variables: Sequence[Any]) -> list[Choice]:
        """Returns the choice for each variable.

        Raises:
            ValueError: If a pattern matches no variable. The message lists the paths of the
                variables.
        """
        paths = [_keras.variables.path(variable) for variable in variables]
        for (kind, pattern), expression in self._compiled.items():
            if not any(matches(expression, path) for path in paths):
                known = f"the paths are: {', '.join(paths)}" if paths else "there are no variables"
                raise ValueError(
                    f"{self.owner}: {kind} pattern {pattern!r} matches no variable; {known}. "
                    "Correct or remove the pattern"
                )
        return [self._choice(v, path) for v, path in zip(variables, paths, strict=True)]

    def _choice(self, variable: Any, path: str) -> Choice:
        if update_interception.is_overwritten(variable):
            return Choice(0.0, "its gradient is its new value")
        if "float" not in _keras.variables.dtype_name(variable):
            return Choice(0.0, f"dtype {_keras.variables.dtype_name(variable)} is not floating")
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
        return Choice(factor, f"{reason}, multiplier {factor:g} from {pattern!r}")

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
            f"{owner}: {kind}={given!r}: expected a regular expression, a list of regular "
            "expressions, or None"
        )
    return list(given)


def _factors(owner: str, given: Any) -> dict[str, float] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{owner}: multipliers={given!r}: expected a dict from regular expressions to factors, "
            "such as {'embedding': 0.1}, or None"
        )
    for pattern, factor in given.items():
        number = isinstance(factor, numbers.Real) and not isinstance(factor, bool)
        if not number or not 0 <= factor < float("inf"):
            raise ValueError(
                f"{owner}: multipliers[{pattern!r}]={factor!r}: expected a finite number "
                "of at least 0"
            )
    return {pattern: float(factor) for pattern, factor in given.items()}
