"""Test of the tests: plants defects in a copy of the sources, one at a time.

    python tests/mutations/run.py [-k WORDS] [--tree FOLDER] [--jobs N]

The copy is in a temporary folder; the checkout is only read. First the tests run on a copy without
a defect, where all must pass. The exit code is 1 if a defect survives, if its text does not occur
exactly once in its file, or if tests cannot run.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutations.defects import DEFECTS
from mutations.defects.defect import Defect

ROOT = Path(__file__).resolve().parents[2]
MOVED = ("layers", "optimizers", "configs")
# Three times the time of the slowest test on one busy core.
LIMIT = 900
# The tests of `make test`, as the Makefile says.
QUICK = "not extended and not slow and not soak"
# The tests of `make test-slow`, for the files that `.ci/run` names.
SLOW = "slow and not soak"


def copy(tree: Path, folder: Path) -> None:
    """Copies the files that tests read, with the package under its installed names.

    Links lead to the former positions.
    """
    for path in tree.iterdir():
        if path.name.startswith(".") or path.name in ("runs", "build", "dist"):
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, folder)
    package = folder / "lib" / "tfwd"
    package.parent.mkdir()
    (folder / "tfwd").rename(package)
    (folder / "tfwd").symlink_to(package)
    for name in MOVED:
        (folder / name).rename(package / name)
        (folder / name).symlink_to(package / name)


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python, with the copy in place of the checkout."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "lib"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )


def tested(folder: Path, arguments: tuple[str, ...], slow: bool) -> tuple[str, str]:
    """Returns "passed", "failed" or "not run" for the tests, and a last line."""
    marks = SLOW if slow else QUICK
    options = ("-x", "-q", "-p", "no:cacheprovider", "--no-header", "-m", marks)
    command = ("-m", "pytest", *options, *arguments)
    try:
        done = python(folder, *command)
    except subprocess.TimeoutExpired:
        return "failed", "out of time"
    kinds = {0: "passed", 1: "failed"}
    printed = done.stdout.splitlines() or [""]
    lines = [line for line in printed if line.startswith(("FAILED", "ERROR"))]
    return kinds.get(done.returncode, "not run"), (lines or printed[-1:])[0]


def plant(folder: Path, defect: Defect) -> str | None:
    """Puts a defect into the copy, and returns the former text.

    Returns None if the defect's old text does not occur exactly once.
    """
    path = folder / defect.file
    before = path.read_text("utf-8")
    if before.count(defect.old) != 1:
        return None
    path.write_text(before.replace(defect.old, defect.new), "utf-8")
    return before


def judge(folder: Path, defect: Defect) -> tuple[str, str]:
    """Returns "caught" or another verdict on a defect, and the test that failed."""
    before = plant(folder, defect)
    if before is None:
        return "no such text", f"not once in {defect.file}: {defect.old.strip()}"
    try:
        what, line = tested(folder, defect.tests, defect.slow)
    finally:
        (folder / defect.file).write_text(before, "utf-8")
    return {"failed": "caught", "passed": "SURVIVED"}.get(what, what), line


def check(folder: Path, chosen: list[Defect]) -> list[str]:
    """Returns the problems before anything is planted: another library, or tests that fail."""
    names = ["tfwd", *(f"tfwd.{name}" for name in MOVED)]
    show = f"import sys, {', '.join(names)}; print(*(sys.modules[n].__file__ for n in {names}))"
    where = python(folder, "-c", show).stdout
    if where.count(str(folder)) != len(names):
        return [f"the copy is not what is imported: {where}"]
    problems = []
    for arguments, slow in dict.fromkeys((defect.tests, defect.slow) for defect in chosen):
        what, line = tested(folder, arguments, slow)
        if what != "passed":
            problems.append(f"without a defect: {what}: {' '.join(arguments)}: {line}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-k", default="", help="only defects whose description or file has this")
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout to look at")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument(
        "--unchecked", action="store_true", help="leave out the run without a defect"
    )
    given = parser.parse_args()
    chosen = [d for d in DEFECTS if given.k in d.what or given.k in d.file]
    if not chosen:
        parser.error(f"-k: no defect has '{given.k}' in its description or file")
    with tempfile.TemporaryDirectory(prefix="tfwd-mutations-") as top:
        folders: queue.Queue[Path] = queue.Queue()
        for number in range(given.jobs):
            folders.put(folder := Path(top).resolve() / str(number))
            folder.mkdir()
            copy(given.tree.resolve(), folder)
        if problems := check(folder, [] if given.unchecked else chosen):
            print(*problems, sep="\n")
            return 1

        def one(defect: Defect) -> str:
            folder, start = folders.get(), time.monotonic()
            try:
                what, line = judge(folder, defect)
            finally:
                folders.put(folder)
            print(
                f"{what:12} {time.monotonic() - start:5.0f} s  {defect.what}\n{'':22}{line}",
                flush=True,
            )
            return what

        with ThreadPoolExecutor(given.jobs) as pool:
            found = list(pool.map(one, chosen))
    caught = found.count("caught")
    print(f"{caught} of {len(found)} defects were found")
    return 0 if found and caught == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
