"""Docstrings: no argument is documented twice."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tfwd", "layers", "optimizers")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


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


def test_it_is_found() -> None:
    text = "Does.\n\nArgs:\n    a: one.\n    b, c: two.\n        more.\n    a: again.\n"
    assert documented_twice(text) == ["a"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_argument_is_documented_twice(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    problems = [
        (path.name, getattr(node, "name", "module"), names)
        for path in files
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, DOCUMENTED)
        if (names := documented_twice(ast.get_docstring(node) or ""))
    ]
    assert problems == []
