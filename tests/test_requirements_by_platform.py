"""The set-up on other processors and systems: resolved for each, and not installed.

uv evaluates environment markers and wheel tags for a given platform, for all dependencies. (pip
evaluates markers for the Python that runs it, whatever `--platform` says.)
"""

import os
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
