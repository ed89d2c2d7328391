"""The set-up on other processors and systems: resolved for each, and not installed.

uv evaluates environment markers and wheel tags for a given platform, for all dependencies. (pip
evaluates markers for the Python that runs it, whatever `--platform` says.)
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from built_packages import built
from stack_marks import once

pytestmark = [pytest.mark.slow, once]

DEFAULT = "cpu,programs,tune,finetune,dev"  # the Makefile's EXTRAS
OLDEST, NEWEST = "3.10", "3.13"
X86_LINUX, ARM_LINUX = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
APPLE, INTEL_MAC = "aarch64-apple-darwin", "x86_64-apple-darwin"
WINDOWS = "x86_64-pc-windows-msvc"
BUILDS = {
    X86_LINUX: "tensorflow-cpu",
    ARM_LINUX: "tensorflow",
    APPLE: "tensorflow",
    WINDOWS: "tensorflow-cpu",
}
HAS_ADDONS = {X86_LINUX: "tensorflow-cpu", APPLE: "tensorflow", INTEL_MAC: "tensorflow"}


class Resolver:
    """Resolver of requirements to versions by name, by wheels only, as `uv pip compile`."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder, self.wheel = folder, wheel

    def extras(self, names: str, platform: str, python: str) -> dict[str, str]:
        done = self.run(f"tfwd[{names}] @ {self.wheel.as_uri()}", platform, python)
        assert done.returncode == 0, done.stderr
        return dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)

    def run(self, line: str, platform: str, python: str) -> subprocess.CompletedProcess[str]:
        options = ["--only-binary", ":all:", "--no-header", "--no-annotate", "--no-config"]
        return subprocess.run(
            [
                *(sys.executable, "-m", "uv", "pip", "compile", "-", *options),
                *("--python-platform", platform, "--python-version", python),
            ],
            input=line,
            cwd=self.folder,
            env={
                **os.environ,
                "UV_CACHE_DIR": str(self.folder / "cache"),
                "UV_PYTHON": sys.executable,
                "UV_PYTHON_DOWNLOADS": "never",
            },
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture(scope="module")
def resolver(tmp_path_factory: pytest.TempPathFactory) -> Resolver:
    made = Resolver(tmp_path_factory.mktemp("resolved"), built(tmp_path_factory))
    # A package without dependencies, available on every platform: only the index can fail.
    done = made.run("absl-py", X86_LINUX, NEWEST)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        pytest.skip(f"the package index cannot be reached by uv: {lines[-1] if lines else ''}")
    return made


@pytest.mark.parametrize("python", [OLDEST, NEWEST])
@pytest.mark.parametrize("platform", BUILDS)
def test_the_default_extras_resolve(resolver: Resolver, platform: str, python: str) -> None:
    versions = resolver.extras(DEFAULT, platform, python)
    assert {"tensorflow", "tensorflow-cpu"} & versions.keys() == {BUILDS[platform]}
    assert versions["keras"].startswith("3.")
    assert {"keras-tuner", "tokenizers", "pytest"} <= versions.keys()


@pytest.mark.parametrize("python", ["3.10", "3.11"])
@pytest.mark.parametrize("platform", HAS_ADDONS)
def test_the_extras_of_the_other_stack_resolve(
    resolver: Resolver, platform: str, python: str
) -> None:
    versions = resolver.extras(DEFAULT.replace("cpu", "addons-cpu"), platform, python)
    assert {"tensorflow", "tensorflow-cpu"} & versions.keys() == {HAS_ADDONS[platform]}
    assert versions["keras"].startswith("2.15.")
    assert versions["tensorflow-addons"].startswith("0.23.")


@pytest.mark.parametrize(
    ("line", "platform", "python"),
    [
        ("tensorflow-addons>=0.23", ARM_LINUX, "3.11"),
        ("tensorflow-addons>=0.23", WINDOWS, "3.11"),
        ("tensorflow-addons>=0.23", X86_LINUX, "3.12"),
        ("tensorflow-cpu>=2.18", ARM_LINUX, NEWEST),
        ("tensorflow-cpu>=2.18", APPLE, NEWEST),
        ("tensorflow>=2.18", INTEL_MAC, OLDEST),
    ],
)
def test_what_the_set_up_leaves_out_has_no_wheel(
    resolver: Resolver, line: str, platform: str, python: str
) -> None:
    """Checks the markers of setup.py, the Makefile's NO_ADDONS and README's table."""
    done = resolver.run(line, platform, python)
    said = " ".join(done.stderr.split())  # uv breaks lines by the width of the terminal
    assert done.returncode != 0 and "has no wheels with a matching" in said, done.stderr


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
ADDONS_TARGETS = ["test-addons", "test-slow", "soak"]


def make(root: Path, *arguments: str, platform: str) -> subprocess.CompletedProcess[str]:
    env = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))
    }
    # The platform's name of a Python that is built for another platform.
    env["_PYTHON_HOST_PLATFORM"] = platform
    return subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


@needs_make
@pytest.mark.parametrize("target", ADDONS_TARGETS)
@pytest.mark.parametrize(
    ("python", "platform", "why"),
    [
        ("{fits}", "linux-aarch64", "no wheel for linux-aarch64; it has wheels for x86-64 Linux"),
        ("", "linux-x86_64", "wheels for Python 3.10 and 3.11; install one of them"),
        ("{newer}", "linux-x86_64", "wheels for Python 3.10 and 3.11; install one of them"),
    ],
    ids=["ARM Linux", "no Python for it", "Python 3.12"],
)
def test_why_the_other_stack_is_skipped_is_said_in_one_line(
    root: Path, tmp_path: Path, target: str, python: str, platform: str, why: str
) -> None:
    python = python.format(
        fits=interpreter(tmp_path, (3, 11)), newer=interpreter(tmp_path, (3, 12))
    )
    done = make(root, target, f"ADDONS_PYTHON={python}", platform=platform)
    lines = [line for line in done.stdout.splitlines() if "skipped" in line]
    assert done.returncode == 0 and len(lines) == 1 and why in lines[0], done.stdout + done.stderr
    assert ".venv-addons" not in done.stdout


def interpreter(folder: Path, version: tuple[int, int]) -> Path:
    """Returns a Python that claims to have another version."""
    path = folder / f"python{version[0]}.{version[1]}"
    start = f"import sys; sys.version_info = {(*version, 0, 'final', 0)}"
    path.write_text(f"#!/bin/sh\nshift; exec \"{sys.executable}\" -c \"{start}; exec('''$1''')\"\n")
    path.chmod(0o755)
    return path


@needs_make
@pytest.mark.parametrize("platform", ["linux-x86_64", "macosx-11.0-arm64", "macosx-10.9-x86_64"])
def test_the_other_stack_is_tested_where_it_has_wheels(
    root: Path, tmp_path: Path, platform: str
) -> None:
    python = interpreter(tmp_path, (3, 11))
    done = make(root, "test-addons", f"ADDONS_PYTHON={python}", platform=platform)
    assert done.returncode == 0 and ".venv-addons/bin/pytest" in done.stdout, done.stderr
    assert "skipped" not in done.stdout


@needs_make
def test_a_program_on_the_other_stack_names_the_missing_wheel(root: Path, tmp_path: Path) -> None:
    python = interpreter(tmp_path, (3, 11))
    # As if setup.py were new: otherwise nothing is set up where it was set up before.
    arguments = ("--what-if=setup.py", "train", "STACK=addons", f"ADDONS_PYTHON={python}")
    done = make(root, *arguments, platform="linux-aarch64")
    first = done.stdout.splitlines()[0]
    assert "cannot set up .venv-addons: tensorflow-addons 0.23 has no wheel for linux-aa" in first
    assert first.endswith("exit 1")
