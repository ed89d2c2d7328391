"""Makes the benchmarks' helpers importable, for these tests alone."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder is on the path, and what was imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    names = {path.stem for path in BENCHMARKS.glob("*.py")}
    for name in names & set(sys.modules):
        del sys.modules[name]
