"""The second stack in `make` on other systems and Pythons: skipped with a reason, or tested."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stack_marks import once

pytestmark = [
    pytest.mark.slow,
    once,
    pytest.mark.skipif(shutil.which("make") is None, reason="there is no make"),
]

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


@pytest.mark.parametrize("platform", ["linux-x86_64", "macosx-11.0-arm64", "macosx-10.9-x86_64"])
def test_the_other_stack_is_tested_where_it_has_wheels(
    root: Path, tmp_path: Path, platform: str
) -> None:
    python = interpreter(tmp_path, (3, 11))
    done = make(root, "test-addons", f"ADDONS_PYTHON={python}", platform=platform)
    assert done.returncode == 0 and ".venv-addons/bin/pytest" in done.stdout, done.stderr
    assert "skipped" not in done.stdout


def test_a_program_on_the_other_stack_names_the_missing_wheel(root: Path, tmp_path: Path) -> None:
    python = interpreter(tmp_path, (3, 11))
    # As if setup.py were new: otherwise nothing is set up where it was set up before.
    arguments = ("--what-if=setup.py", "train", "STACK=addons", f"ADDONS_PYTHON={python}")
    done = make(root, *arguments, platform="linux-aarch64")
    first = done.stdout.splitlines()[0]
    assert "cannot set up .venv-addons: tensorflow-addons 0.23 has no wheel for linux-aa" in first
    assert first.endswith("exit 1")
