"""Tables of cases that are divided between the suite, `make test-slow` and `make soak`."""

from collections.abc import Container, Iterable
from typing import Any

import pytest
from stacks import rest, soak


def with_slow_rest(
    cases: Iterable[str], kept: Container[str], soaked: Container[str] = ()
) -> list[Any]:
    """Returns parameters for each case by its name.

    Those that are not kept are slow, and with Keras 2, or where so given, for `make soak`.
    """
    return [pytest.param(case, marks=_marks(case, kept, soaked), id=case) for case in cases]


def _marks(case: str, kept: Container[str], soaked: Container[str]) -> list[Any]:
    if case in kept:
        return []
    return [soak] if case in soaked else [rest]
