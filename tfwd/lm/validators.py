"""Validators of configuration values, each with the words for its error message."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from tfwd.lm.errors import suggest

DTYPE_POLICIES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "mixed_float16",
    "mixed_bfloat16",
)


class Validator(NamedTuple):
    """A test of a value, and what is expected in words ("give ...")."""

    expected: str
    is_valid: Callable[[Any], bool]
    hint: Callable[[Any], str] = lambda value: ""


def one_of(*values: str) -> Validator:
    """The validator that a value is one of `values`."""
    return Validator(" or ".join(values), lambda value: value in values, lambda v: _hint(v, values))


# Optimizers of tensorflow-addons, which are here on Keras 2 alone, and what is nearest to each.
ADDONS = {
    "tfa.AdaBelief": ("Adam", "AdamW"),
    "tfa.COCOB": ("Adam",),
    "tfa.ConditionalGradient": ("SGD",),
    "tfa.LAMB": ("Lamb",),
    "tfa.LazyAdam": ("Adam",),
    "tfa.NovoGrad": ("Adam", "AdamW"),
    "tfa.RectifiedAdam": ("Adam", "AdamW"),
    "tfa.Yogi": ("Adam", "AdamW"),
}


def optimizers() -> dict[str, str]:
    """The names of the optimizers that there are, by the same in lower case."""
    from tfwd._keras import steps  # slow to load, and `--help` does without

    return {name.lower(): name for name in steps.names()}


def optimizer_class(name: str) -> type:
    """The optimizer of a name, which may be in any case."""
    from tfwd._keras import steps

    return steps.optimizer_class(optimizers()[name.lower()])


def arguments(optimizer: str) -> dict[str, Any]:
    """What may stand in `optimizer.kwargs` for this optimizer, with the defaults."""
    own = ("self", "kwargs", "learning_rate", "weight_decay", "global_clipnorm")  # have own keys
    there = inspect.signature(optimizer_class(optimizer)).parameters
    return {name: parameter.default for name, parameter in there.items() if name not in own}


def defaults(optimizer: type) -> dict[str, Any]:
    """The arguments of an optimizer class whose default is neither none nor zero."""
    parameters = inspect.signature(optimizer).parameters.values()
    return {p.name: p.default for p in parameters if p.default and p.default is not p.empty}


def patterns(text: str) -> list[str]:
    """The regular expressions in a text: what stands between its spaces.

    Example:
        >>> patterns("bias decoder/.*")
        ['bias', 'decoder/.*']
    """
    return text.split()


def multipliers(text: str) -> dict[str, float]:
    """The factors by regular expression in a text of pattern=factor, with spaces between.

    Raises:
        ValueError: a part is not of this form.

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


def _are(read: Callable[[str], Any]) -> Callable[[Any], bool]:
    """The test that a text can be read, and the patterns in it are regular expressions."""

    def holds(value: Any) -> bool:
        try:
            for pattern in read(value):
                re.compile(pattern)
        except (AttributeError, ValueError, re.error):
            return False
        return True

    return holds


def _whole(value: Any, least: int = 0, most: int = 2**31 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _text(value: Any) -> bool:
    try:
        return isinstance(value, str) and b"\0" not in value.encode("utf-8")
    except UnicodeEncodeError:
        return False


def written(value: Any) -> bool:
    """Whether JSON can hold a value, so that a run that goes on finds the same one.

    Example:
        >>> written([0.9, "adam", None]), written(object()), written(math.nan)
        (True, False, False)
    """
    if isinstance(value, (list, tuple)):
        return all(map(written, value))
    return value is None or isinstance(value, bool) or _text(value) or _number(value)


def same_kind(value: Any, default: Any) -> str:
    """What is right for an argument with that default, in words; "" if the value is.

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


def _hint(value: Any, values: Any) -> str:
    found = suggest(value, values) if isinstance(value, str) else []
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def _optimizer_hint(value: Any) -> str:
    """Where an optimizer of tensorflow-addons is to be had, and what is near to it here."""
    there = optimizers()
    known = {name.lower(): name for name in ADDONS}
    if not isinstance(value, str) or value.lower() not in known:
        return _hint(value, there)
    name = known[value.lower()]
    near_it = [other for other in ADDONS[name] if other.lower() in there]
    instead = f"; nearest to it here is {' or '.join(near_it)}" if near_it else ""
    return (
        f" ({name} is of tensorflow-addons, which pip install '.[addons]' in a checkout brings, on "
        f"Python 3.10 or 3.11{instead})"
    )


FLAG = Validator("true or false", lambda v: isinstance(v, bool))
TEXT = Validator("a text of UTF-8 without a zero byte", _text)
_MOST = "at most 2147483647"
WHOLE = Validator(f"a whole number, at least 0 and {_MOST}", _whole)
COUNT = Validator(f"a whole number, at least 1 and {_MOST}", lambda v: _whole(v, 1))
# NumPy's generator, which Keras seeds, takes 32 bits.
SEED = Validator(
    "a whole number, at least 0 and at most 4294967295", lambda v: _whole(v, 0, 2**32 - 1)
)
# They are drawn one by one, a few thousand a second.
TOKENS = Validator("a whole number, at least 0 and at most 1000000", lambda v: _whole(v, 0, 10**6))
POSITIVE = Validator("a number above 0", lambda v: _number(v) and v > 0)
NOT_NEGATIVE = Validator("a number, at least 0", lambda v: _number(v) and v >= 0)
RATE = Validator("a rate: at least 0, below 1", lambda v: _number(v) and 0 <= v < 1)
FACTOR = Validator("a factor above 0, at most 1", lambda v: _number(v) and 0 < v <= 1)
UNITS = Validator(
    "whole numbers of at least 1, one a layer, as 300,150",
    lambda v: isinstance(v, tuple) and len(v) > 0 and all(_whole(u, 1) for u in v),
)
PATTERNS = Validator(
    "regular expressions for paths of weights, with spaces between", _are(patterns)
)
MULTIPLIERS = Validator("pattern=factor, with spaces between, as embeddings=0.5", _are(multipliers))
MAPPING = Validator(
    "arguments by name, as optimizer.kwargs.momentum=0.9", lambda v: hasattr(v, "items")
)
OPTIMIZER = Validator(
    "an optimizer of keras.optimizers, as sgd, adam, adamw, rmsprop",
    lambda v: isinstance(v, str) and v.lower() in optimizers(),
    _optimizer_hint,
)
