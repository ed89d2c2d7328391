"""The examples run, and their models answer new texts."""

import importlib.util
from pathlib import Path

import pytest
from stack_marks import once
from watched_processes import Processes, finish

FOLDER = Path(__file__).parents[1] / "examples"
# The number that `main` returns at least. The docstring of each `main` says what it is.
REACHED = {
    "ctc_speech": 0.6,
    "custom_train_step": 0.9,
    "find_nan": 0.9,
    "keras_hub_in_place": 0.9,
    "mixout": -0.02,
    "pretrained_parts": 0.05,
    "sweep": 0.5,
    "text_classifier": 0.8,
    "two_workers": 1.5,
    "uncertainty": 0.95,
}
PAGES = FOLDER.parent / "docs" / "examples"


def test_all_are_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(REACHED)


@pytest.mark.parametrize("name", REACHED)
def test_an_example_is_short_and_has_a_page(name):
    assert len((FOLDER / f"{name}.py").read_text("utf-8").splitlines()) <= 100
    assert all((PAGES / f"{name}.{kind}").is_file() for kind in ("md", "txt", "png"))


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
@pytest.mark.filterwarnings("ignore:FiniteCheck. skipped a step:UserWarning")
@pytest.mark.parametrize("name", REACHED)
def test_an_example(name, tmp_path):
    if name in ("mixout", "uncertainty"):
        pytest.importorskip("sklearn")
    if name.startswith("keras_hub"):
        pytest.importorskip("keras_hub")
        pytest.importorskip("tensorflow_text")
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(tmp_path) > REACHED[name]
    assert (tmp_path / f"{name}.png").stat().st_size > 5_000
