"""The built wheel: its content, and its use without checkout and editable install."""

import ast
import json
import os
import sys
import sysconfig
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from wheels import built, run

pytestmark = pytest.mark.slow

MOVED = {"layers": "tfwd/layers", "optimizers": "tfwd/optimizers"}

IMPORT_ALL = """
import importlib, importlib.util, json, sys
names = ["tfwd", "tfwd.layers", "tfwd.optimizers", "tfwd.runs", "tfwd.lm", "tfwd.finetune"]
files = {name: importlib.import_module(name).__file__ for name in names}
bare = [name for name in ("layers", "optimizers") if importlib.util.find_spec(name)]
json.dump({"files": files, "bare": bare}, sys.stdout)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a wheel of this checkout's sources."""
    return built(tmp_path_factory)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the installed wheel and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir")
    run(*pip, "install", "--no-deps", "--no-index", "--target", target, wheel, cwd=target)
    return target


def distribution(installed: Path) -> PathDistribution:
    (info,) = installed.glob("tfwd-*.dist-info")
    return PathDistribution(info)


def test_wheel_holds_every_source_and_nothing_else(wheel: Path, root: Path) -> None:
    expected = {"tfwd/py.typed", "tfwd_programs.py"}
    for folder in ("tfwd", *MOVED):
        for path in (root / folder).rglob("*.py"):
            name = path.relative_to(root / folder).as_posix()
            expected.add(f"{MOVED.get(folder, folder)}/{name}")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in held if ".dist-info/" not in name} == expected
    assert any(name.endswith("LICENSE") for name in held)


def test_wheel_imports_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    # -S leaves out site-packages, and with it the editable install's hook; PYTHONPATH brings the
    # packages back without the hook.
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    seen = json.loads(
        run(sys.executable, "-S", "-c", IMPORT_ALL, cwd=tmp_path, PYTHONPATH=path).splitlines()[-1]
    )
    for name, file in seen["files"].items():
        assert Path(file) == installed.joinpath(*name.split("."), "__init__.py")
    assert seen["bare"] == []


@pytest.mark.parametrize("folder", [".", "..", "tests"])
def test_an_installed_wheel_imports_in_the_checkout_too(
    installed: Path, root: Path, folder: str
) -> None:
    # At the top of the checkout Python takes the tfwd/ that is there, without layers/ in it.
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    cwd = (root / folder).resolve()
    seen = json.loads(
        run(sys.executable, "-S", "-c", IMPORT_ALL, cwd=cwd, PYTHONPATH=path).splitlines()[-1]
    )
    found = {name: Path(file).resolve().parent for name, file in seen["files"].items()}
    if folder == ".":
        places = {"tfwd": root / "tfwd"}
        places |= {f"tfwd.{name}": root / "tfwd" / name for name in ("runs", "lm", "finetune")}
        places |= {f"tfwd.{name}": root / name for name in MOVED}
    else:
        places = {name: installed.joinpath(*name.split(".")) for name in found}
    assert found == places


def test_import_works_from_any_folder(tmp_path: Path, root: Path) -> None:
    code = "from tfwd import layers, optimizers as o; print(layers.__file__); print(o.__file__)"
    lines = run(sys.executable, "-c", code, cwd=tmp_path).splitlines()
    assert [Path(line).resolve() for line in lines[-2:]] == [
        root / "layers" / "__init__.py",
        root / "optimizers" / "__init__.py",
    ]


def test_console_scripts_point_at_functions(installed: Path) -> None:
    scripts = {
        entry.name: entry
        for entry in distribution(installed).entry_points
        if entry.group == "console_scripts"
    }
    assert set(scripts) == {
        "tfwd-classify",
        "tfwd-evaluate",
        "tfwd-finetune",
        "tfwd-generate",
        "tfwd-pretrained",
        "tfwd-train",
        "tfwd-tune",
    }
    for entry in scripts.values():
        source = installed.joinpath(*entry.module.split(".")).with_suffix(".py")
        functions = [node for node in ast.parse(source.read_text("utf-8")).body]
        defined = {node.name for node in functions if isinstance(node, ast.FunctionDef)}
        assert entry.attr in defined, entry


def test_neither_build_of_tensorflow_is_forced(installed: Path) -> None:
    requires = distribution(installed).requires or []
    tensorflow = [line for line in requires if line.startswith("tensorflow")]
    named = {line.split(";")[0].strip() for line in tensorflow}
    assert {"tensorflow-cpu>=2.18", "tensorflow>=2.18", "tensorflow-addons<0.24,>=0.23"} < named
    assert all("extra ==" in line for line in tensorflow)


def test_missing_tensorflow_names_both_builds(installed: Path, tmp_path: Path) -> None:
    # Python marks a module that must not be found by None in sys.modules.
    code = (
        "import sys; sys.modules['tensorflow'] = None\n"
        "try:\n    import tfwd\nexcept ImportError as error:\n    print(error)"
    )
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    message = run(sys.executable, "-S", "-c", code, cwd=tmp_path, PYTHONPATH=path)
    assert "pip install tensorflow, or tensorflow-cpu" in message, message
