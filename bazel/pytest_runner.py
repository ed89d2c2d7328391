"""Runs pytest for each Bazel test target, on a copy of the files that the target names.

Bazel gives a test links to the checkout. Tests find the repository from their own resolved path.
With the links they would read and write the checkout itself, and see files that their target does
not name. The library is imported from Bazel's own tree, as installed.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest


def main(arguments: list[str]) -> int:
    """Runs the named test files, relative to the repository, and returns pytest's exit code."""
    named = Path(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
    scratch = Path(os.environ["TEST_TMPDIR"])
    checkout = scratch / "checkout"
    shutil.copytree(named, checkout, ignore=lambda path, _: ["lib"] if path == str(named) else [])
    os.chdir(checkout)
    os.environ["MPLCONFIGDIR"] = str(scratch / "matplotlib")  # the home folder is read-only

    # The editable install of `make setup` would find files that a target forgot to name.
    sys.meta_path[:] = [f for f in sys.meta_path if not f.__module__.startswith("__editable__")]
    found = importlib.util.find_spec("tfwd")
    if found is None or found.origin != str(named / "lib" / "tfwd" / "__init__.py"):
        raise SystemExit(f"tfwd is not that of the target: {found}")

    options = [f"--basetemp={scratch / 'pytest'}", f"--rootdir={checkout}"]
    if report := os.environ.get("XML_OUTPUT_FILE"):
        options.append(f"--junitxml={report}")
    if wanted := os.environ.get("TESTBRIDGE_TEST_ONLY"):  # bazel test --test_filter=...
        options.append(f"-k={wanted}")
    return pytest.main([*options, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
