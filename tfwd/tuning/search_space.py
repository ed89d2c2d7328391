"""Values that a sweep may vary: `Float`, `Int`, `Choice` and `Boolean`, by name.

They are declared to keras-tuner as its own hyperparameters, with one difference: the values of a
`Float` with a step are listed exactly. keras-tuner counts steps with `//`, so 0 to 0.7 in steps of
0.1 has no 0.7. It also adds the steps, so the fourth value is 0.30000000000000004.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras_tuner

_MOST = 100_000  # values of a range with a step


@dataclasses.dataclass(frozen=True)
class Float:
    """Range of numbers in [low, high].

    Args:
        low, high: float. Both ends belong to the range.
        step: float. Allows only `low + i * step`, or `low * step**i` in a logarithmic range.
            Default None, for any number, rounded to six digits.
        log: bool. Draws uniformly on a logarithmic scale. Default False.

    Raises:
        ValueError: If the ends are not in order or not finite; if the step is invalid.

    Example:
    >>> from tfwd.tuning import Float
    >>> Float(0, 0.7, step=0.1).values
    (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    >>> Float(1e-4, 1e-2, step=10, log=True).values
    (0.0001, 0.001, 0.01)
    """

    low: float
    high: float
    step: float | None = None
    log: bool = False

    def __post_init__(self) -> None:
        _check_range(self, (int, float))

    @property
    def values(self) -> tuple[float, ...] | None:
        """Returns all values in increasing order; None for a continuous range."""
        if self.step is None:
            return None
        if self.log:
            count = math.floor(math.log(self.high / self.low) / math.log(self.step) + 1e-6)
            return tuple(_short(self.low * self.step**i) for i in range(count + 1))
        count = math.floor((self.high - self.low) / self.step + 1e-6)
        return tuple(_short(self.low + i * self.step) for i in range(count + 1))

    @property
    def ends(self) -> tuple[float, float]:
        """Returns the lowest and the highest value."""
        if self.values:
            return self.values[0], self.values[-1]
        return float(self.low), float(self.high)

    def declare(self, hp: keras_tuner.HyperParameters, name: str) -> Any:
        """Declares the hyperparameter. Returns its value in this trial, as `read` would."""
        if self.values is not None:
            return hp.Choice(name, list(self.values), ordered=True)
        sampling = "log" if self.log else "linear"
        return self.read(hp.Float(name, float(self.low), float(self.high), sampling=sampling))

    def read(self, value: Any) -> float:
        """Converts a value of keras-tuner to a value of the space."""
        return value if self.step is not None else min(max(_short(value), self.low), self.high)

    def __str__(self) -> str:
        return _range_text(self)


@dataclasses.dataclass(frozen=True)
class Int:
    """Range of whole numbers in [low, high].

    Args:
        low, high: int. Both ends belong to the range.
        step: int. Allows only `low + i * step`. Default 1.
        log: bool. Draws uniformly on a logarithmic scale. It cannot be combined with a step.
            Default False.

    Example:
    >>> from tfwd.tuning import Int
    >>> Int(10, 30, step=10).values
    (10, 20, 30)
    """

    low: int
    high: int
    step: int = 1
    log: bool = False

    def __post_init__(self) -> None:
        _check_range(self, int)
        if self.log and self.step != 1:
            raise ValueError(f"{self!r}: a logarithmic Int takes no step; remove step or log")

    @property
    def values(self) -> tuple[int, ...]:
        """Returns all values in increasing order."""
        return tuple(range(self.low, self.high + 1, self.step))

    @property
    def ends(self) -> tuple[int, int]:
        """Returns the lowest and the highest value."""
        return self.values[0], self.values[-1]

    def declare(self, hp: keras_tuner.HyperParameters, name: str) -> int:
        """Declares the hyperparameter, and returns its value in this trial."""
        if self.log:
            return hp.Int(name, self.low, self.high, sampling="log")
        return hp.Int(name, self.low, self.high, step=self.step)

    def read(self, value: Any) -> int:
        """Converts a value of keras-tuner to a value of the space."""
        return int(value)

    def __str__(self) -> str:
        return _range_text(self)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Set of values: numbers, texts, booleans or tuples.

    Args:
        values: List of at least one value.

    Example:
    >>> from tfwd.tuning import Choice
    >>> str(Choice([(300, 150), (400, 200)]))
    '300,150 | 400,200'
    """

    values: Sequence[Any]

    def __post_init__(self) -> None:
        if isinstance(self.values, str) or not len(self.values):
            raise ValueError(f"{self!r}: give a list of values, such as Choice(['adam', 'sgd'])")
        found = tuple(tuple(v) if isinstance(v, list) else v for v in self.values)
        object.__setattr__(self, "values", found)
        if len({_written(value) for value in found}) < len(found):
            raise ValueError(f"{self!r}: a value is listed twice; list each value once")

    @property
    def numbers(self) -> bool:
        """Returns True if all values are numbers, which have an order."""
        return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in self.values)

    @property
    def ends(self) -> tuple[Any, ...]:
        """Returns all values, because any of them may be invalid."""
        return tuple(self.values)

    def declare(self, hp: keras_tuner.HyperParameters, name: str) -> Any:
        """Declares the hyperparameter, and returns its value in this trial."""
        if self.numbers:
            kind = int if all(isinstance(value, int) for value in self.values) else float
            return self.read(hp.Choice(name, [kind(value) for value in self.values]))
        return self.read(hp.Choice(name, [_written(value) for value in self.values]))

    def read(self, value: Any) -> Any:
        """Converts a value of keras-tuner to a value of the space."""
        if self.numbers:
            return next(own for own in self.values if own == value)
        return next(own for own in self.values if _written(own) == value)

    def __str__(self) -> str:
        return " | ".join(map(_written, self.values))


def Boolean() -> Choice:
    """Returns the choice between False and True."""
    return Choice((False, True))


Spec = Float | Int | Choice


def hyperparameters(space: Mapping[str, Spec]) -> keras_tuner.HyperParameters:
    """Returns keras-tuner's declaration of a space."""
    hp = keras_tuner.HyperParameters()
    for name, spec in space.items():
        spec.declare(hp, name)
    return hp


def hp_text(hp: Any | None) -> str:
    """Returns a keras-tuner hyperparameter as text, or "not varied" for None.

    Example:
    >>> hp = hyperparameters({"rate": Float(0, 0.2, step=0.1), "any": Float(1e-3, 1, log=True)})
    >>> [hp_text(each) for each in hp.space]
    ['0.0 | 0.1 | 0.2', '0.001 to 1, log']
    """
    if hp is None:
        return "not varied"
    config = hp.get_config()
    if "values" in config:
        return " | ".join(map(_written, config["values"]))
    if "min_value" not in config:  # a Boolean, or a fixed value
        return _written(config["value"]) if "value" in config else "false | true"
    step = config["step"] if config["step"] not in (None, 1) else None
    text = f"{config['min_value']:g} to {config['max_value']:g}"
    text += "" if step is None else f", step {step:g}"
    return text + ("" if config["sampling"] == "linear" else f", {config['sampling']}")


def read(space: Mapping[str, Spec], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a trial, from keras-tuner's values."""
    return {name: spec.read(values[name]) for name, spec in space.items()}


def size(space: Mapping[str, Spec]) -> int | None:
    """Returns the number of points in a space; None if it is continuous."""
    counts = [len(spec.values) if spec.values is not None else 0 for spec in space.values()]
    return math.prod(counts) or None


def grid_size(space: Mapping[str, Spec]) -> int:
    """Returns the number of points in keras-tuner's grid, which samples a continuous range."""
    declared = hyperparameters(space).space
    return math.prod(len({hp.default, *hp.values}) for hp in declared)


def _check_range(spec: Float | Int, kind: Any) -> None:
    for value in (spec.low, spec.high, 1 if spec.step is None else spec.step):
        if not isinstance(value, kind) or isinstance(value, bool) or not math.isfinite(value):
            what = "whole numbers" if kind is int else "finite numbers"
            raise ValueError(f"{spec!r}: give {what}")
    if spec.low > spec.high:
        raise ValueError(f"{spec!r}: low is above high; exchange them")
    if spec.log and spec.low <= 0:
        raise ValueError(f"{spec!r}: a logarithmic range must start above 0")
    least = 1 if spec.log and isinstance(spec, Float) else 0
    if spec.step is not None and spec.step <= least:
        raise ValueError(f"{spec!r}: give a step above {least}")
    if spec.step is None:
        return
    if kind is int or not spec.log:
        count = (spec.high - spec.low) / spec.step
    else:
        count = (math.log(spec.high) - math.log(spec.low)) / math.log(spec.step)
    if count >= _MOST:  # the values are listed
        raise ValueError(f"{spec!r}: the range has more than {_MOST:,} values; give a larger step")


def _range_text(spec: Float | Int) -> str:
    text = f"{spec.low:g} to {spec.high:g}"
    if spec.step is not None and not (isinstance(spec, Int) and spec.step == 1):
        text += f", {'times' if spec.log else 'step'} {spec.step:g}"
    return text + (", log" if spec.log else "")


def _short(value: float) -> float:
    """Rounds to six significant digits, so that a user can type the value."""
    return float(f"{value:.6g}")


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
