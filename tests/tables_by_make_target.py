"""Tables of cases that are divided between the suite, `make test-slow` and `make soak`."""

from collections.abc import Container, Iterable
from typing import Any

import pytest
from stack_marks import rest, soak


def with_slow_rest(
    cases: Iterable[str], kept: Container[str], soaked: Container[str] = ()
) -> list[Any]:
    """Returns parameters for each case by its name.

    The other cases are slow. With Keras 2, or on request, they are for `make soak`.
    """
    return [pytest.param(case, marks=_marks(case, kept, soaked), id=case) for case in cases]


def _marks(case: str, kept: Container[str], soaked: Container[str]) -> list[Any]:
    if case in kept:
        return []
    return [soak] if case in soaked else [rest]
