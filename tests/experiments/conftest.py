"""Makes the experiments' modules importable, for these tests alone."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture(autouse=True)
def helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder is on the path, and what was imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    yield
    names = {path.stem for path in EXPERIMENTS.glob("*.py")}
    for name in names & set(sys.modules):
        del sys.modules[name]
