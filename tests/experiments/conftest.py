"""A fixture that makes the experiments importable in these tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture(autouse=True)
def helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts the folder on the path, and removes the modules imported from it afterwards."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    yield
    names = {path.stem for path in EXPERIMENTS.glob("*.py")}
    for name in names & set(sys.modules):
        del sys.modules[name]
