"""The Python blocks of README.md and docs/, run in order for each page as a reader would."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stack_marks import once, quick_rows

ROOT = Path(__file__).resolve().parents[1]
# Blocks that train several trials.
SLOW = {"README.md"}
SLOW |= {f"docs/{name}.md" for name in ("non_finite", "optimizers", "tuning", "uncertainty")}
PUBLIC = {
    "tfwd.callbacks",
    "tfwd.distribute",
    "tfwd.gradients",
    "tfwd.layers",
    "tfwd.layers.transformer",
    "tfwd.metrics",
    "tfwd.numerics",
    "tfwd.optimizers",
    "tfwd.optimizers.addons",
    "tfwd.parametrizations",
    "tfwd.pretrained",
    "tfwd.tuning",
}
RUN = """
import json, sys
names = {"__name__": "__main__"}
for page, line, code in json.load(sys.stdin):
    # Tracebacks have the page's own line numbers.
    exec(compile("\\n" * line + code, page, "exec"), names)
"""


def blocks(page: str) -> list[tuple[str, int, str]]:
    """Returns the page, the number of the line before the block, and the block."""
    text = (ROOT / page).read_text("utf-8")
    # A block that begins with --8<-- is an example's file, which test_examples.py runs.
    found = re.finditer(r"^```python\n(?!--8<--)(.*?)^```$", text, re.M | re.S)
    return [(page, text.count("\n", 0, one.start(1)), one[1]) for one in found]


def pages() -> list[str]:
    there = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/**/*.md"))]
    return [page for page in ["README.md", *there] if blocks(page)]


def run(page: str, folder: Path) -> str:
    """Returns the output of the blocks, in a process and a folder of their own."""
    # The published models that a reader would have.
    for name, model in (("folder", "bert"), ("albert", "albert"), ("t5", "t5")):
        published = ROOT / "tests" / "layers" / "transformer" / "published" / model
        shutil.copytree(published, folder / name)
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(blocks(page)),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_there_are_pages() -> None:
    assert {"README.md", "docs/gradient_moments.md", "docs/optimizers.md"} <= set(pages())
    assert set(pages()) >= SLOW


@quick_rows("docs/pretrained.md")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow, *[once] * (page != "README.md")])
        if page in SLOW
        else page
        for page in pages()
    ],
)
def test_a_page_runs_from_its_top_to_its_end(page: str, tmp_path: Path) -> None:
    printed = run(page, tmp_path)
    if page == "docs/gradient_moments.md":  # two noise scales, the first in a list
        scales = [float(number) for number in re.findall(r"[\d.]+", printed)]
        assert len(scales) == 2 and all(1 < scale < 1000 for scale in scales)


def test_every_block_of_code_says_what_it_is() -> None:
    """Checks that no block of Python has another name, under which it would not run."""
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        fences = re.findall(r"^```(.*)$", path.read_text("utf-8"), re.M)[::2]
        assert set(fences) <= {"", "text", "console", "python"}, path


@pytest.mark.parametrize("name", sorted({"tfwd", *PUBLIC}))
def test_every_public_name_is_in_the_reference(name: str) -> None:
    module = importlib.import_module(name)
    pages = "".join(path.read_text("utf-8") for path in ROOT.glob("docs/reference/*.md"))
    documented = set(re.findall(r"^::: (\S+)$", pages, re.M))
    names = getattr(module, "__all__", None) or [
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == name
    ]
    public = {f"{name}.{key}" for key in names if key != "__version__"}
    assert public and public - set(PUBLIC) <= documented


def test_no_page_or_message_tells_to_install_from_an_index() -> None:
    """Checks that no text refers to a package index: extras belong to a checkout."""
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    for folder in ("tfwd", "layers", "optimizers"):
        texts += (ROOT / folder).rglob("*.py")
    found = [str(p) for p in texts if re.search(r"install ['\"]?tfwd", p.read_text("utf-8"))]
    assert len(texts) > 100 and not found
