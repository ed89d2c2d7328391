"""The examples run, and their models answer new texts."""

import importlib.util
from pathlib import Path

import pytest
from stacks import once

FOLDER = Path(__file__).parents[1] / "examples"
# The accuracy that is reached at least, where half is chance.
REACHED = {
    "apart_then_together": 0.9,
    "first_layers": 0.95,
    "mixed_models": 0.95,
    "own_embeddings": 0.8,
}


def test_all_are_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(REACHED)


@pytest.mark.slow
@once
@pytest.mark.parametrize("name", REACHED)
def test_an_example(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main() > REACHED[name]
