"""The site, as `make docs` builds it: without warnings, and with an entry for each public name."""

import os
import re
import subprocess
import zlib
from pathlib import Path

import pytest
from stack_marks import once

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.slow,
    once,
    pytest.mark.skipif(
        not (ROOT / ".venv-docs/.installed").exists(),
        reason="MkDocs is not installed: run make docs",
    ),
]


def test_make_docs_builds_the_pages_and_the_reference(tmp_path: Path) -> None:
    """Checks also that no entry of the reference shows a file with the name of a function."""
    # `make test-slow ARGS=...` would pass its arguments on.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    command = ["make", "docs", f"SITE={tmp_path}", "ARGS="]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    pages = [path.relative_to(ROOT / "docs") for path in ROOT.glob("docs/**/*.md")]
    assert len(pages) > 30
    assert not [page for page in pages if not (tmp_path / page).with_suffix(".html").exists()]

    inventory = (tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]
    lines = [line.split() for line in zlib.decompress(inventory).decode().splitlines()]
    roles = {line[0]: line[1] for line in lines}
    reference = "".join(path.read_text("utf-8") for path in ROOT.glob("docs/reference/*.md"))
    entries = re.findall(r"^::: (\S+)$", reference, re.M)
    assert len(entries) > 50
    assert {roles[entry] for entry in entries} == {"py:class", "py:function"}
