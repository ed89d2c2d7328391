"""The built wheel: its content, and its use without checkout and editable install."""

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from built_packages import built, run
from stack_marks import once

import tfwd

pytestmark = pytest.mark.slow

MOVED = {"layers": "tfwd/layers", "optimizers": "tfwd/optimizers", "configs": "tfwd/configs"}

IMPORT_ALL = """
import importlib, importlib.util, json, sys
names = ["tfwd"]
names += [f"tfwd.{n}" for n in ("configs", "layers", "optimizers", "runs", "lm", "finetune")]
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


def test_the_sdist_holds_the_same_sources(wheel: Path, root: Path) -> None:
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    sources = {"setup.py", "tfwd_programs.py", "tfwd/py.typed", "README.md", "LICENSE"}
    for folder in ("tfwd", *MOVED):
        sources |= {path.relative_to(root).as_posix() for path in (root / folder).rglob("*.py")}
    assert sources | {"CHANGELOG.md", "CITATION.cff"} <= held


def test_the_version_is_the_same_everywhere(installed: Path, root: Path) -> None:
    version = tfwd.__version__
    assert distribution(installed).version == version
    assert f"\nversion: {version}\n" in (root / "CITATION.cff").read_text("utf-8")
    headings = re.findall(r"^## \[(.+?)\]", (root / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert headings[:2] == ["Unreleased", version]


def test_a_user_of_the_layers_installs_two_packages(installed: Path) -> None:
    requires = distribution(installed).requires or []
    assert sorted(line for line in requires if "extra ==" not in line) == [
        "numpy>=1.26",
        "safetensors>=0.8",
    ]


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
    assert "run pip install tensorflow, or pip install tensorflow-cpu" in message, message


USER = """
import keras
import numpy as np

import tfwd
from tfwd import callbacks, layers, numerics, optimizers
from tfwd import parametrizations as P


def build(rate: float) -> keras.Model:
    inputs = keras.Input((8,))
    hidden = layers.WeightDropout(keras.layers.Dense(4), rate=rate)(inputs)
    model = keras.Model(inputs, layers.VariationalNoise(keras.layers.Dense(1), stddev=0.1)(hidden))
    model.compile(optimizers.DecoupledWeightDecay(keras.optimizers.Adam(), 0.01), "mse")
    return model


class Halved(P.Parametrization):
    def __call__(self, weight: object, seed: object) -> object:
        return weight


x = np.zeros((4, 8), "float32")
model = tfwd.parametrize(build(0.5), {"kernel": P.Chain([P.GaussianNoise(0.1), P.Mixout(0.5)])})
checks = [callbacks.FiniteCheck(action="skip"), callbacks.GradientSquaredMean(every_n_steps=2)]
mean, stddev, samples = tfwd.predict_samples(model, x, n=3)
moments = tfwd.gradients.moments(model, x, x[:, :1], keras.losses.MeanSquaredError())
report: str = f"{moments.methods} {numerics.summarize(x)} {tfwd.__version__}"
plain: keras.Model = tfwd.unwrap(model)
lstm = layers.WeightDropLSTM(4, weight_dropout=0.5)
"""


@once
def test_a_users_file_passes_strict_mypy(wheel: Path, tmp_path: Path) -> None:
    # In an environment that has only tfwd. Keras has no types, and NumPy is not installed there.
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    target = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
    )
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir")
    run(
        *pip,
        "install",
        "--no-deps",
        "--no-index",
        "-q",
        "--target",
        target.strip(),
        wheel,
        cwd=tmp_path,
    )
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n[mypy-keras.*,numpy.*]\nignore_missing_imports = true\n"
    )
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "user.py"]
    for line, errors in (("", 0), ("wrong: int = tfwd.__version__\n", 1)):
        (tmp_path / "user.py").write_text(USER + line)
        done = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == errors, done.stdout + done.stderr
        assert done.stdout.count("error:") == errors, done.stdout


TRAIN = """
import importlib.util, keras, numpy as np, tfwd
from tfwd import layers
from tfwd import parametrizations as P

assert not [name for name in ("matplotlib", "ml_collections") if importlib.util.find_spec(name)]
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model = tfwd.parametrize(model, {"kernel": P.Dropout(0.5)})
model.compile("adam", "mse")
model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[tfwd.callbacks.FiniteCheck()])
print(tfwd.__file__)
"""


@once
def test_the_wheel_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = (python, "-m", "pip", "--disable-pip-version-check", "install", "-q")
    environment = {**os.environ, "PYTHONPATH": "", "TF_CPP_MIN_LOG_LEVEL": "3"}

    def call(*command: str | Path) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        return subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )

    if call(*install, "--dry-run", "absl-py").returncode:
        pytest.skip("the package index cannot be reached")
    done = call(*install, f"{wheel}[cpu]")
    assert done.returncode == 0, done.stderr
    done = call(python, "-c", TRAIN)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "venv") in done.stdout
    train = (python.parent / "tfwd-train", "--config=quickstart", "--workdir=run")
    done = call(*train)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: tfwd-train needs ") and "[programs]" in done.stderr

    done = call(*install, f"{wheel}[cpu,programs]")
    assert done.returncode == 0, done.stderr
    short = ("--config.training.epochs=1", "--config.model.hidden_units=(8,)")
    done = call(*train, *short, "--config.model.embedding_dim=8")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report" / "curves.png").is_file()
    done = call(python.parent / "tfwd-train", "--config=quikstart", "--workdir=other")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "quickstart" in done.stderr and "awd_lstm_ptb" in done.stderr
