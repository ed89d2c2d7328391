"""A fixture that makes the benchmarks importable in these tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts the folder on the path, and removes the modules imported from it afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    tops = {path.stem for path in BENCHMARKS.glob("*.py")} | {"common", "peers"}
    for name in [name for name in sys.modules if name.split(".")[0] in tops]:
        del sys.modules[name]
