"""The finished runs of the fine-tuning experiment: a file with one JSON object per line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fine_tuning_plan import Run

RESULTS = Path(__file__).resolve().parent / "results" / "fine_tuning.jsonl"
# A line with another protocol is ignored: raise it if the training or the texts change.
PROTOCOL = 1

Lines = dict[Run, dict[str, Any]]


def read(path: Path) -> Lines:
    """Returns the finished runs of this protocol; none if there is no file.

    An incomplete last line is ignored, because a process was killed while it wrote that line.

    Raises:
        ValueError: a complete line is not a run.
    """
    found: Lines = {}
    if not path.exists():
        return found
    complete = path.read_text("utf-8").rpartition("\n")[0]
    for number, text in enumerate(complete.splitlines(), 1):
        try:
            line = json.loads(text)
            if line["protocol"] == PROTOCOL:
                found[Run(*(line[name] for name in Run._fields))] = line
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is not a run ({error!r}): expected a JSON object with "
                f"protocol, {', '.join(Run._fields)}; correct or delete the line"
            ) from error
    return found


def check_texts(path: Path, fingerprints: Mapping[str, str]) -> None:
    """Checks that the finished runs have the texts that the next runs will have.

    Args:
        path: the file of finished runs.
        fingerprints: task -> a short hash of its texts.

    Raises:
        ValueError: a finished run has other texts.
    """
    for run, line in read(path).items():
        if line["data"] != fingerprints[run.task]:
            raise ValueError(
                f"{path}: the texts of {run.task} have the fingerprint {line['data']} in finished "
                f"runs and {fingerprints[run.task]} in --data; give the same texts, or another "
                "file by --results"
            )


def append(path: Path, run: Run, result: Mapping[str, Any]) -> None:
    """Adds one finished run, and returns when the line is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"protocol": PROTOCOL, **run._asdict(), **result}, allow_nan=False)
    with open(path, "a+b") as file:
        file.seek(0)
        content = file.read()
        if not content.endswith(b"\n"):  # an incomplete last line, or an empty file
            file.truncate(content.rfind(b"\n") + 1)
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def carry_out(
    path: Path,
    plan: Callable[[Lines], Sequence[Run]],
    make: Callable[[Run], Mapping[str, Any]],
    minutes: float,
    expected: Callable[[Run, Lines], float],
    show: Callable[[Lines, Sequence[Run], float], None],
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Makes the runs that are not in the file, one after another, and appends each.

    Args:
        path: the file of finished runs.
        plan: finished runs -> all runs, in order. It is asked again after each run.
        make: makes one run and returns the fields of its line.
        minutes: no run starts if it would probably end later than this.
        expected: a run and the finished runs -> expected seconds.
        show: called before each run, and at the end, with the finished runs, the runs that are
            left, and the estimated seconds that these need.
        clock: seconds from any start.

    Returns:
        True if all runs are finished.
    """
    began = clock()
    while True:
        lines = read(path)
        left = [run for run in plan(lines) if run not in lines]
        show(lines, left, sum(expected(run, lines) for run in left))
        if not left:
            return True
        if clock() - began + expected(left[0], lines) > 60 * minutes:
            return False
        append(path, left[0], make(left[0]))
