"""The examples in the docstrings of every module, under the module's installed name.

pytest's own --doctest-modules would import ``layers/`` by its folder's name, which is an error.
"""

import doctest
import importlib
from pathlib import Path

import pytest
from stacks import IS_KERAS_2

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"tfwd": "tfwd", "layers": "tfwd.layers", "optimizers": "tfwd.optimizers"}
OTHER_KERAS = "_keras3" if IS_KERAS_2 else "_keras2"


def module_names() -> list[str]:
    names = []
    for folder, package in SOURCES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            if OTHER_KERAS not in inner:
                names.append(".".join([package, *(part for part in inner if part != "__init__")]))
    return names


@pytest.mark.parametrize("name", module_names())
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for example in doctest.DocTestFinder(exclude_empty=True).find(module):
        runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)
