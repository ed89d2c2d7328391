"""Docstrings: no argument is documented twice, and a function's summary begins with a verb."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tfwd", "layers", "optimizers")
ALL = (*FOLDERS, "benchmarks", "configs", "examples", "experiments", "tests")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the name and the docstring of a file, and of each class and function in it."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, DOCUMENTED):
            yield getattr(node, "name", "module"), ast.get_docstring(node) or ""


def documented_twice(docstring: str) -> list[str]:
    found: list[str] = []
    section = ""
    names: list[str] = []
    for line in [*docstring.splitlines(), "End"]:
        if line and not line.startswith(" "):
            counts = Counter(names)
            found += [name for name, count in counts.items() if count > 1]
            section, names = line, []
        elif section in ("Args:", "Attributes:") and re.match(r" {4}[*\w][*\w, ]*:", line):
            names += line.partition(":")[0].split(", ")
    return [name.strip() for name in found]


def test_an_argument_that_is_documented_twice_is_found() -> None:
    text = "Does.\n\nArgs:\n    a: one.\n    b, c: two.\n        more.\n    a: again.\n"
    assert documented_twice(text) == ["a"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_argument_is_documented_twice(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    problems = [
        (path.name, name, names)
        for path in files
        for name, docstring in docstrings(path)
        if (names := documented_twice(docstring))
    ]
    assert problems == []


def begins_with_a_question(docstring: str) -> bool:
    return re.match(r"(What|Whether)\b", docstring) is not None


def test_a_question_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""What it is."""\n\n'
        'class A:\n    """Whatever it is."""\n\n'
        '    def b(self):\n        """Whether it is."""\n\n'
        '        async def c():\n            """Checks whether it is."""\n'
    )
    found = {name for name, text in docstrings(path) if begins_with_a_question(text)}
    assert found == {"module", "b"}


@pytest.mark.parametrize("folder", ALL)
def test_no_docstring_begins_with_a_question(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    problems = [
        (str(path.relative_to(ROOT)), name)
        for path in files
        for name, docstring in docstrings(path)
        if begins_with_a_question(docstring)
    ]
    assert problems == []


def is_property(node: ast.AST) -> bool:
    decorators = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ())]
    return any("property" in decorator for decorator in decorators)


def test_summaries_of_functions_begin_with_a_verb_in_the_third_person() -> None:
    summaries = [
        (path.name, node.name, docstring.splitlines()[0])
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node)
        if (docstring := ast.get_docstring(node))
    ]
    assert len(summaries) > 500
    assert [found for found in summaries if not re.match(r"[A-Z][a-z]+s\b", found[2])] == []
