"""The import direction, read from the sources: each module imports only modules below it.

The tests read every import statement, also inside functions. A new module needs a height in the
table below.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"tfwd": "tfwd", "layers": "tfwd.layers", "optimizers": "tfwd.optimizers"}

# A module may import lower modules, and a package its own modules.
HEIGHTS = {
    0: {"tfwd._keras_shared", "tfwd.dtypes", "tfwd.atomic_files", "tfwd.path_patterns"}
    | {"tfwd.current_watch", "tfwd.optional_packages"},
    1: {"tfwd._keras2", "tfwd._keras3"},
    2: {"tfwd._keras"},
    3: {"tfwd.training_flag"},
    4: {"tfwd._graph", "tfwd.distribute", "tfwd.pretrained"},
    5: {"tfwd._random", "tfwd._recurrent", "tfwd.finite", "tfwd.parametrization_rates"},
    6: {"tfwd.parametrizations"},
    7: {"tfwd.layers", "tfwd.optimizers"},
    8: {
        "tfwd.dropout_moment_matching",
        "tfwd.gradients",
        "tfwd.in_place",
        "tfwd.in_place_state_file",
        "tfwd.numerics",
    },
    9: {"tfwd.callbacks", "tfwd.metrics", "tfwd.parametrized_model", "tfwd.monte_carlo"},
    10: {"tfwd", "tfwd.tuning"},
    11: {"tfwd.runs"},
    12: {"tfwd.conversion", "tfwd.finetune", "tfwd.lm"},
}
HEIGHT = {name: height for height, names in HEIGHTS.items() for name in names}

# Modules that only the programs need. `import tfwd` must not load them.
PROGRAMS_ONLY = {
    "absl",
    "keras_tuner",
    "matplotlib",
    "ml_collections",
    "rich",
    "tensorboard",
    "tokenizers",
}


def sources() -> dict[str, ast.Module]:
    """Returns every module's syntax tree by its installed name; packages have their own name."""
    trees = {}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            trees[".".join([package, *inner])] = ast.parse(path.read_text("utf-8"), str(path))
    return trees


SOURCES = sources()
MODULES = {name.removesuffix(".__init__") for name in SOURCES}


def is_ours(name: str) -> bool:
    return name.split(".")[0] == "tfwd"


def imported(name: str, tree: ast.Module) -> Iterator[str]:
    """Yields the full names of a module's imports, with relative imports resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # name is the file's, so one level up is the package of a module and of an __init__.
            base = name.split(".")[: -node.level] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{prefix}.{alias.name}"
                yield full if full in MODULES or not is_ours(full) else prefix


def unit(name: str) -> str:
    """Returns the entry of HEIGHT for a module: a package's modules share the package's entry."""
    parts = name.removesuffix(".__init__").split(".")
    return ".".join(parts[:2])


@pytest.mark.parametrize("name", SOURCES)
def test_imports_run_one_way(name: str) -> None:
    own = unit(name)
    assert own in HEIGHT, f"{name} has no height: give {own} its place in HEIGHTS of this test"
    others = {unit(other) for other in imported(name, SOURCES[name]) if is_ours(other)}
    wrong = sorted(other for other in others - {own} if HEIGHT.get(other, 0) >= HEIGHT[own])
    assert not wrong, f"{name} imports {wrong}, which is not below it"


def circles(trees: dict[str, ast.Module]) -> list[list[str]]:
    """The groups of modules that import each other, by whatever way; imports for types count."""
    names = {name.removesuffix(".__init__"): name for name in trees}
    targets = {
        name: set(imported(file, trees[file])) & set(names) - {name} for name, file in names.items()
    }

    def reached(start: str) -> set[str]:
        found, waiting = set(), [start]
        while waiting:
            new = targets[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    reach = {name: reached(name) for name in names}
    groups = {
        tuple(sorted(other for other in reach[name] if name in reach[other]))
        for name in names
        if name in reach[name]
    }
    return sorted(map(list, groups))


def test_no_modules_import_each_other() -> None:
    assert circles(SOURCES) == []


def test_circles_are_found() -> None:
    # `imported` knows the modules of the sources, so the example uses their names.
    of_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tfwd import "
    trees = {
        "tfwd.parametrization_rates": "def f():\n    import tfwd.path_patterns",
        "tfwd.path_patterns": "from tfwd.dtypes import wide",
        "tfwd.dtypes": of_types + "parametrization_rates",
        "tfwd.atomic_files": "import tfwd.parametrization_rates",
        "tfwd.numerics.__init__": "from tfwd.numerics import tensorboard_and_plot_files",
        "tfwd.numerics.tensorboard_and_plot_files": "from . import unknown",
    }
    found = circles({name: ast.parse(source) for name, source in trees.items()})
    assert found == [
        ["tfwd.dtypes", "tfwd.parametrization_rates", "tfwd.path_patterns"],
        ["tfwd.numerics", "tfwd.numerics.tensorboard_and_plot_files"],
    ]


@pytest.mark.parametrize("name", SOURCES)
def test_library_needs_nothing_that_is_for_programs(name: str) -> None:
    if unit(name) not in {"tfwd.conversion", "tfwd.finetune", "tfwd.lm", "tfwd.runs"}:
        tops = {other.split(".")[0] for other in imported(name, SOURCES[name])}
        # Sweeps over a custom model need keras-tuner; `import tfwd` does not load it.
        allowed = {"keras_tuner"} if unit(name) == "tfwd.tuning" else set()
        assert not tops & (PROGRAMS_ONLY - allowed)


def versions_read(name: str, tree: ast.Module) -> Iterator[str]:
    """Yields the places in a module that ask which Keras or TensorFlow is installed."""
    for other in imported(name, tree):
        if other in {"keras.__version__", "keras.version"}:
            yield other
        if other.startswith("tensorflow") and other.endswith(("__version__", "VERSION")):
            yield other
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if text.startswith(("keras.__version__", "keras.version")):
                yield text
            if text in {"tf.__version__", "tensorflow.__version__", "tf.version.VERSION"}:
                yield text
            if node.attr == "IS_KERAS_2":
                yield text
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.name == "IS_KERAS_2")
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("version"):
            values = {
                argument.value for argument in node.args if isinstance(argument, ast.Constant)
            }
            if values & {"keras", "tensorflow", "tensorflow-cpu", "tensorflow-addons"}:
                yield ast.unparse(node)


def internals_used(name: str, tree: ast.Module) -> Iterator[str]:
    """Yields the places in a module that use Keras's internals, or name one of the two versions."""
    for other in imported(name, tree):
        if other.startswith(("keras.src", "tfwd._keras2", "tfwd._keras3", "tfwd._keras_shared")):
            yield other
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if text.startswith(("keras.src", "tf.keras", "tensorflow.keras")):
                yield text


@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"tfwd._keras"}))
def test_one_module_asks_for_versions(name: str) -> None:
    assert list(versions_read(name, SOURCES[name])) == []


# The code for each Keras, the code that both share, and the module that chooses.
ABOUT_KERAS = ("tfwd._keras", "tfwd._keras2", "tfwd._keras3", "tfwd._keras_shared")


@pytest.mark.parametrize("name", sorted(n for n in SOURCES if unit(n) not in ABOUT_KERAS))
def test_no_other_module_uses_kerass_internals(name: str) -> None:
    assert list(internals_used(name, SOURCES[name])) == []


# Each name that `_keras` exports has a module of the same name for each Keras.
GIVEN_OUT = imported("tfwd._keras", SOURCES["tfwd._keras"])
PAIRS = sorted({name for name in GIVEN_OUT if name.startswith("tfwd._keras3.")})
# Keras 3 has its own `ops`. Only Keras 2 has two kinds of optimizers.
ONLY_FOR_KERAS_2 = {"ops", "optimizer_kinds"}


def test_either_keras_has_the_same_modules() -> None:
    of_2, of_3 = (
        {name.rpartition(".")[2] for name in SOURCES if unit(name) == package}
        for package in ("tfwd._keras2", "tfwd._keras3")
    )
    assert of_2 - of_3 == ONLY_FOR_KERAS_2
    assert of_3 - {"__init__"} == {name.rpartition(".")[2] for name in PAIRS}


@pytest.mark.parametrize(
    "source",
    [
        "from keras import __version__",
        "import keras\nif keras.__version__ < '3.6': pass",
        "import keras\nkeras.version()",
        "import tensorflow as tf\nprint(tf.version.VERSION)",
        "import tensorflow as tf\ntf.__version__",
        "import importlib.metadata\nimportlib.metadata.version('keras')",
        "from tfwd import _keras\nif _keras.IS_KERAS_2: pass",
        "from tfwd._keras import IS_KERAS_2",
    ],
)
def test_a_question_for_a_version_is_noticed(source: str) -> None:
    assert list(versions_read("tfwd.example", ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import keras.src.backend",
        "from keras.src import ops",
        "import keras\nkeras.src.backend.floatx()",
        "import tensorflow as tf\ntf.keras.layers.Dense(1)",
        "from tfwd import _keras2",
        "from tfwd._keras3 import layers",
        "from tfwd._keras_shared import substitution_scopes",
    ],
)
def test_internals_are_noticed(source: str) -> None:
    assert list(internals_used("tfwd.example", ast.parse(source)))


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("tfwd.lm.data.__init__", "from . import corpus", "tfwd.lm.data.corpus"),
        ("tfwd.lm.data.corpus", "from . import unknown_function", "tfwd.lm.data"),
        ("tfwd.lm.data.corpus", "from ...layers import WeightDropout", "tfwd.layers"),
        ("tfwd.parametrization_rates", "from .lm.data.corpus import x", "tfwd.lm.data.corpus"),
        ("tfwd.parametrization_rates", "def f():\n    from tfwd import layers", "tfwd.layers"),
        ("tfwd.parametrization_rates", "from tfwd import WeightDropout", "tfwd"),
    ],
)
def test_imports_are_read_right(name: str, source: str, expected: str) -> None:
    assert list(imported(name, ast.parse(source))) == [expected]


def run(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300
    )


def test_import_brings_no_program_libraries(tmp_path: Path) -> None:
    # Keras and TensorFlow import some of them; only the imports that tfwd adds count.
    code = (
        "import json, sys, keras, tensorflow; before = set(sys.modules);"
        "import tfwd, tfwd.layers, tfwd.optimizers;"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    added = set(json.loads(done.stdout.splitlines()[-1]))
    assert "tfwd.layers" in added
    assert "tfwd.layers.transformer.t5" in added  # so that files with its layers can be loaded
    assert not added & (PROGRAMS_ONLY | {"tfwd.lm", "tfwd.runs", "tfwd.tuning"})


@pytest.mark.parametrize("package", ["layers", "optimizers"])
@pytest.mark.parametrize("statement", ["import {}", "from {} import x", "import {}.x"])
def test_bare_import_names_the_right_module(package: str, statement: str) -> None:
    done = run(statement.format(package), ROOT)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError:") and f"tfwd.{package}" in last
