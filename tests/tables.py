"""Tables of cases, of which the suite takes some and `make test-slow` the rest."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def with_slow_rest(cases: Iterable[str], kept: Container[str]) -> list[Any]:
    """Parameters for each case by its name; those that are not kept are slow."""
    return [
        pytest.param(case, marks=[] if case in kept else [pytest.mark.slow], id=case)
        for case in cases
    ]
