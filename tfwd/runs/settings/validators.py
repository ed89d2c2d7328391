"""Validators of config values, each with a text for its error message."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tfwd.runs.errors import suggest

DTYPE_POLICIES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "mixed_float16",
    "mixed_bfloat16",
)


class Validator(NamedTuple):
    """Check of a value. `expected` describes valid values in the error message: "give ..."."""

    expected: str
    is_valid: Callable[[Any], bool]
    hint: Callable[[Any], str] = lambda value: ""


def one_of(*values: str) -> Validator:
    """Returns the validator that accepts one of `values`."""
    return Validator(" or ".join(values), lambda value: value in values, lambda v: hint(v, values))


def patterns(text: str) -> list[str]:
    """Returns the regular expressions in a text, which are separated by spaces.

    Example:
    >>> patterns("bias decoder/.*")
    ['bias', 'decoder/.*']
    """
    return text.split()


def multipliers(text: str) -> dict[str, float]:
    """Returns the factors by regular expression, from a text like "pattern=factor pattern=factor".

    Raises:
        ValueError: a part has another form.

    Example:
    >>> multipliers("embeddings=0.5 .*kernel=2")
    {'embeddings': 0.5, '.*kernel': 2.0}
    """
    found = {}
    for part in text.split():
        pattern, equals, factor = part.rpartition("=")
        if not equals or not NOT_NEGATIVE.is_valid(float(factor)):
            raise ValueError(part)
        found[pattern] = float(factor)
    return found


def _is_list_of_patterns(read: Callable[[str], Any]) -> Callable[[Any], bool]:
    """Returns a check: `read` accepts the text, and its patterns are regular expressions."""

    def is_valid(value: Any) -> bool:
        try:
            for pattern in read(value):
                re.compile(pattern)
        except (AttributeError, ValueError, re.error):
            return False
        return True

    return is_valid


def is_whole_number(value: Any, least: int = 0, most: int = 2**31 - 1) -> bool:
    """Returns True if a value is a whole number from `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the range of floats
        return False


def _text(value: Any) -> bool:
    try:
        return isinstance(value, str) and b"\0" not in value.encode("utf-8")
    except UnicodeEncodeError:
        return False


def is_json_value(value: Any) -> bool:
    """Returns True if JSON can store a value, so that a resumed run reads the same value.

    Example:
    >>> is_json_value([0.9, "adam", None]), is_json_value(object()), is_json_value(math.nan)
    (True, False, False)
    """
    if isinstance(value, (list, tuple)):
        return all(map(is_json_value, value))
    return value is None or isinstance(value, bool) or _text(value) or _number(value)


def same_kind(value: Any, default: Any) -> str:
    """Describes the type that an argument's default requires. Returns "" if the value has it.

    Example:
    >>> same_kind("abc", 0.9), same_kind(1, 0.9)
    ('a number', '')
    """
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else FLAG.expected
    if isinstance(default, (int, float)):
        return "" if _number(value) else "a number"
    if isinstance(default, str):
        return "" if isinstance(value, str) else TEXT.expected
    return "a number" if default is None and isinstance(value, str) else ""


def shown(value: Any) -> str:
    """Returns a value as text, in the form of the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value[:200] or "''"
    if isinstance(value, int):
        # Python does not print the decimal digits of a very large number.
        text = hex(value) if abs(value) > 1 << 256 else str(value)
    else:
        text = "{}" if not isinstance(value, float) and not value else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def hint(value: Any, values: Iterable[str]) -> str:
    """Returns the most similar valid values, as the end of an error message."""
    found = suggest(value, values) if isinstance(value, str) else []
    return f" (did you mean {' or '.join(found)}?)" if found else ""


FLAG = Validator("true or false", lambda v: isinstance(v, bool))
TEXT = Validator("a UTF-8 text without zero bytes", _text)
_MOST = "at most 2147483647"
WHOLE = Validator(f"a whole number, at least 0 and {_MOST}", is_whole_number)
COUNT = Validator(f"a whole number, at least 1 and {_MOST}", lambda v: is_whole_number(v, 1))
# Keras seeds NumPy's generator, which takes 32 bits.
SEED = Validator(
    "a whole number, at least 0 and at most 4294967295", lambda v: is_whole_number(v, 0, 2**32 - 1)
)
POSITIVE = Validator("a number above 0", lambda v: _number(v) and v > 0)
NOT_NEGATIVE = Validator("a number, at least 0", lambda v: _number(v) and v >= 0)
RATE = Validator("a rate: at least 0, below 1", lambda v: _number(v) and 0 <= v < 1)
FACTOR = Validator("a factor above 0, at most 1", lambda v: _number(v) and 0 < v <= 1)
PATTERNS = Validator(
    "regular expressions for paths of weights, separated by spaces", _is_list_of_patterns(patterns)
)
MULTIPLIERS = Validator(
    "pattern=factor, separated by spaces, such as embeddings=0.5", _is_list_of_patterns(multipliers)
)
MAPPING = Validator(
    "arguments by name, such as optimizer.kwargs.momentum=0.9", lambda v: hasattr(v, "items")
)
