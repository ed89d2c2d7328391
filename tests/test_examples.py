"""The examples run, and their models answer new texts."""

import importlib.util
from pathlib import Path

import pytest
from processes import Processes, finish
from stacks import once

FOLDER = Path(__file__).parents[1] / "examples"
# The accuracy that is reached at least, where half is chance. For `in_place` it is a share of
# variance, where 0 is chance.
REACHED = {
    "apart_then_together": 0.9,
    "first_layers": 0.95,
    "in_place": 0.9,
    "keras_hub_in_place": 0.9,
    "mixed_models": 0.95,
    "own_embeddings": 0.8,
}


def test_all_are_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(REACHED)


@pytest.mark.slow
@once
def test_an_example_says_what_it_needs():
    code = """
import runpy, sys
sys.modules["keras_hub"] = None
runpy.run_path(sys.argv[1])
"""
    with Processes() as started:
        file = str(FOLDER / "keras_hub_in_place.py")
        status, output = finish(started.python(code, [file]))
    assert status == 1
    assert "pip install --no-deps keras-hub" in output.splitlines()[-1]


@pytest.mark.slow
@once
# A loaded model of keras-hub compiles itself, with an optimizer that is not built yet.
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")
@pytest.mark.parametrize("name", REACHED)
def test_an_example(name):
    if name.startswith("keras_hub"):
        pytest.importorskip("keras_hub")
        pytest.importorskip("tensorflow_text")
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main() > REACHED[name]
