"""Runs every benchmark and writes the page of results: `make bench`.

    python benchmarks/run_all.py
    python benchmarks/run_all.py NAME ... [--out page.md]

A benchmark is a script in this folder. It may print anything, and ends with one line of JSON:

    {"benchmark": NAME, "rows": [...], more ...}

The rows have the format of `measure.Row.to_json`. If a script has no rows, its JSON is shown
unchanged. Plots are the PNG files that the scripts write into `plots/`. A script that fails or
takes too long is reported, and all other scripts still run. The exit status is 1 if a script
failed.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import measure
from common.measure import Row

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results.md"
PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "torch", "transformers", "jax", "optax")
ALLOWED = 120.0  # seconds that a script may take
LIMIT = 300.0  # seconds after which a script is stopped


@dataclasses.dataclass
class Outcome:
    """The outcome of one script.

    Attributes:
        name: Name of the script.
        seconds: Duration of the script.
        line: The script's JSON line, or None.
        problem: The error, or an empty text.
    """

    name: str
    seconds: float
    line: dict[str, Any] | None
    problem: str = ""

    @property
    def rows(self) -> list[Row]:
        """The script's rows. The list is empty without a JSON line."""
        return [Row.from_json(row) for row in (self.line or {}).get("rows", [])]


def scripts(folder: Path = FOLDER) -> list[Path]:
    """Returns the benchmarks of a folder: every script except this one."""
    return sorted(
        path
        for path in folder.glob("*.py")
        if path.name != Path(__file__).name
        and 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
    )


def run(path: Path, limit: float = LIMIT) -> Outcome:
    """Runs one script. Its progress and its errors go to the terminal."""
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, str(path)], stdout=subprocess.PIPE, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return Outcome(path.stem, limit, None, f"stopped after {limit:g} s")
    seconds = time.monotonic() - begin
    if done.returncode:
        return Outcome(path.stem, seconds, None, f"failed with status {done.returncode}")
    line = last_json(done.stdout)
    if line is None:
        return Outcome(path.stem, seconds, None, "did not end with a line of JSON")
    slow = f"took {seconds:.0f} s, of {ALLOWED:g} s allowed" if seconds > ALLOWED else ""
    return Outcome(path.stem, seconds, line, slow)


def last_json(text: str) -> dict[str, Any] | None:
    """Returns the JSON object in the last line that is not blank, or None."""
    lines = text.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def markdown(outcomes: Sequence[Outcome], plots: Sequence[Path], out: Path) -> str:
    """Returns the text of the page of results.

    Args:
        outcomes: Outcomes of the scripts.
        plots: PNG files.
        out: Path of the page. The links to the plots are relative to its folder.
    """
    parts = ["# Benchmarks", "", f"`make bench` wrote this page. {machine()}.", ""]
    parts += [
        "Sides run in turn. A ratio is the median over the rounds, and the spread is its quartiles",
        "(for an exponent: the least and the greatest of the doublings). Ratios matter, not times.",
        "",
    ]
    rows = [row for outcome in outcomes for row in outcome.rows]
    if rows:
        parts += [_line(measure.HEADS), _line(["---"] * len(measure.HEADS))]
        parts += [_line(measure.cells(row)) for row in rows]
        judged = [row.reached for row in rows if row.reached is not None]
        parts += ["", f"{sum(judged)} of {len(judged)} figures are reached.", ""]
    methods = {o.name: o.line["method"] for o in outcomes if o.line and "method" in o.line}
    for name, method in methods.items():
        parts.append(f"- `{name}`: memory is {method}.")
    parts += [""] if methods else []
    problems = [outcome for outcome in outcomes if outcome.problem]
    if problems:
        parts += ["## Errors", ""]
        parts += [f"- `{outcome.name}`: {outcome.problem}" for outcome in problems] + [""]
    others = [outcome for outcome in outcomes if outcome.line and not outcome.rows]
    if others:
        parts += ["## Other figures", ""]
        for outcome in others:
            parts += [
                f"`{outcome.name}`:",
                "```json",
                json.dumps(outcome.line, indent=1),
                "```",
                "",
            ]
    if plots:
        parts += ["## Plots", ""]
        for path in plots:
            where = path.relative_to(out.parent) if path.is_relative_to(out.parent) else path
            parts += [f"![{path.stem.replace('_', ' ')}]({where.as_posix()})", ""]
    return "\n".join(parts).rstrip() + "\n"


def machine() -> str:
    """Returns the number of cores, Python's version and the versions of the compared libraries."""
    found = [f"{measure.cores()} cores", f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _line(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _path(given: str) -> Path:
    return Path(given).resolve()


def main() -> int:
    """Runs the scripts, writes the page, and returns the number of scripts that failed."""
    there = {path.stem: path for path in scripts()}
    options = measure.parser(__doc__)
    options.add_argument(
        "names", nargs="*", metavar="NAME", help="some of the scripts; default: all"
    )
    options.add_argument(
        "--out",
        type=_path,
        help="page to write; default: benchmarks/results.md for all scripts, none for some",
    )
    options.add_argument(
        "--limit", type=float, default=LIMIT, help="seconds after which a script is stopped"
    )
    chosen = options.parse_args()
    unknown = [name for name in chosen.names if name not in there]
    if unknown:
        options.error(f"unknown script {', '.join(unknown)}: give some of {', '.join(there)}")
    # A run of some scripts does not replace the page of all scripts, unless `--out` names the page.
    out = chosen.out or (None if chosen.names else RESULTS)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
    outcomes, page = [], ""
    for name in chosen.names or there:
        measure.CONSOLE.rule(name)
        outcomes.append(run(there[name], chosen.limit))
        if outcomes[-1].problem:
            measure.CONSOLE.print(f"{name}: {outcomes[-1].problem}", style="red")
        # The page is written after each script, so that a stopped run has its results.
        page = markdown(outcomes, sorted((FOLDER / "plots").glob("*.png")), out or RESULTS)
        if out:
            out.write_text(page, encoding="utf-8")
    print(page)
    measure.CONSOLE.print(f"written to {out}" if out else "not written to a file: see --out")
    return sum(outcome.line is None for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
