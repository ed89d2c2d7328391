"""The examples in the docstrings of every module, under the module's installed name.

pytest's own --doctest-modules would import ``layers/`` by its folder's name, which is an error.
"""

import ast
import builtins
import doctest
import importlib
import re
from pathlib import Path

import pytest
from stack_marks import IS_KERAS_2

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


def unbound(code: str) -> set[str]:
    """Returns the names that code uses and does not define or import."""
    used, bound = set(), set(dir(builtins))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {name.asname or name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler):
            bound.add(node.name or "")
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Name):
            (bound if isinstance(node.ctx, ast.Store) else used).add(node.id)
    return used - bound


def test_unbound_names_are_found() -> None:
    assert unbound("import a.b\nfor c in a.d(lambda e: e): print(c, f)") == {"f"}


def test_an_example_of_the_reference_imports_what_it_uses() -> None:
    """Checks that a reader can copy an example without names of the module around it."""
    pages = "".join(path.read_text("utf-8") for path in ROOT.glob("docs/reference/*.md"))
    entries = re.findall(r"^::: (\S+)\.(\w+)$", pages, re.M)
    examples = {
        f"{module}.{name}": doctest.script_from_examples(
            getattr(importlib.import_module(module), name).__doc__ or ""
        )
        for module, name in entries
    }
    assert len(examples) > 50
    missing = {name: unbound(code) for name, code in examples.items()}
    assert {name: names for name, names in missing.items() if names} == {}
