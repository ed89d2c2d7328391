"""Bazel's files: a target for each file, and a dependency for each import of a concept.

BUILD files have Python's syntax, so they run here, with functions that record their arguments.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOVED = ("layers/", "optimizers/", "configs/")


def read(package: Path, kind: str) -> dict[str, dict]:
    """Returns the arguments of each target of a kind, by the target's name."""
    targets: dict[str, dict] = {}

    def glob(include: list[str], exclude: Iterable[str] = ()) -> list[str]:
        def found(patterns: Iterable[str]) -> set[Path]:
            return {path for pattern in patterns for path in package.glob(pattern)}

        paths = found(include) - found(exclude)
        return sorted(path.relative_to(package).as_posix() for path in paths)

    def note(name: str, **arguments: object) -> None:
        assert name not in targets, name
        targets[name] = arguments

    def ignore(*_: object, **__: object) -> None:
        pass

    names = ("concept", "exports_files", "filegroup", "licenses", "load", "program", "tests")
    functions = {name: note if name == kind else ignore for name in names}
    exec((package / "BUILD.bazel").read_text("utf-8"), {**functions, "glob": glob})
    return targets


CONCEPTS = read(ROOT, "concept")


def module(source: str) -> str:
    """Returns the installed name of a source file."""
    inner = ("tfwd/" if source.startswith(MOVED) else "") + source
    return inner.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


OF_CONCEPT = {
    module(source): name for name, target in CONCEPTS.items() for source in target["srcs"]
}


def imported(source: str) -> Iterator[str]:
    """Yields the concepts that a source file imports, also inside functions."""
    for node in ast.walk(ast.parse((ROOT / source).read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [
                full if (full := f"{node.module}.{alias.name}") in OF_CONCEPT else str(node.module)
                for alias in node.names
            ]
        else:
            continue
        yield from (OF_CONCEPT[name] for name in names if name in OF_CONCEPT)


def with_deps(name: str) -> set[str]:
    """Returns a concept and all concepts that it depends on."""
    deps = [dep.removeprefix(":") for dep in CONCEPTS[name].get("deps", ())]
    return {name}.union(*map(with_deps, deps))


def test_every_source_has_one_target() -> None:
    sources = ["tfwd/py.typed", "tfwd_programs.py"]
    for folder in ("tfwd", "layers", "optimizers", "configs"):
        sources += [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")]
    given = [source for target in CONCEPTS.values() for source in target["srcs"]]
    assert Counter(given) == Counter(sources)


@pytest.mark.parametrize("name", CONCEPTS)
def test_concepts_name_what_they_import(name: str) -> None:
    sources = [source for source in CONCEPTS[name]["srcs"] if source.endswith(".py")]
    used = {other for source in sources for other in imported(source)}
    assert used <= with_deps(name), f"//:{name} needs {sorted(used - with_deps(name))} in its deps"


def test_every_test_file_has_one_target() -> None:
    tests = ROOT / "tests"
    given = [file for target in read(tests, "tests").values() for file in target["files"]]
    files = [path.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")]
    assert Counter(given) == Counter(files)


def test_options_name_tests_that_exist() -> None:
    for name, target in read(ROOT / "tests", "tests").items():
        files = {file.removesuffix(".py") for file in target["files"]}
        for option in ("fast", "more", "manual"):
            assert set(target.get(option, ())) <= files, (name, option)
