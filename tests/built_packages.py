"""An sdist and a wheel of this checkout, for the tests of installed packages.

The build works on a copy of the sources, because setuptools writes beside the sources and would
pack files of an earlier build.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Returns the standard output of a command, which must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(temporary: pytest.TempPathFactory) -> Path:
    """Returns the path of a wheel of this checkout's sources. The sdist is beside it."""
    root = Path(__file__).resolve().parents[1]
    copy = temporary.mktemp("sources")
    for path in root.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, copy)
    for name in ("tfwd", "layers", "optimizers", "tests", "configs"):
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = temporary.mktemp("wheel")
    # Builds the sdist, and then the wheel from the sdist.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=copy)
    (wheel,) = out.glob("*.whl")
    return wheel
