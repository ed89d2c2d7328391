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
# A line with another protocol is ignored. Increase the number if the training or the texts change.
PROTOCOL = 1

Lines = dict[Run, dict[str, Any]]


def read(path: Path) -> Lines:
    """Returns the finished runs of this protocol. The dict is empty if the file does not exist.

    An incomplete last line is ignored. It comes from a process that was killed while writing.

    Raises:
        ValueError: If a complete line is not a run.
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
    """Checks that the finished runs used the same texts as the next runs.

    Args:
        path: File of finished runs.
        fingerprints: dict from a task to a short hash of its texts.

    Raises:
        ValueError: If a finished run used other texts.
    """
    for run, line in read(path).items():
        if line["data"] != fingerprints[run.task]:
            raise ValueError(
                f"{path}: the texts of {run.task} have the fingerprint {line['data']} in finished "
                f"runs and {fingerprints[run.task]} in --data: give the same texts, or give "
                "another file with --results"
            )


def append(path: Path, run: Run, result: Mapping[str, Any]) -> None:
    """Appends one finished run. Returns after the line is on the disk."""
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
    """Makes the runs that are not in the file, one after another, and appends each run.

    Args:
        path: File of finished runs.
        plan: Function from the finished runs to all runs, in order. It is called again after each
            run.
        make: Function that makes one run and returns the fields of its line.
        minutes: float. Time limit. A run does not start if it would probably end later.
        expected: Function from a run and the finished runs to the run's expected seconds.
        show: Function that is called before each run and at the end. It gets the finished runs, the
            remaining runs, and the estimated seconds of the remaining runs.
        clock: Function that returns the time in seconds.

    Returns:
        True if all runs are finished.
    """
    start = clock()
    while True:
        lines = read(path)
        remaining = [run for run in plan(lines) if run not in lines]
        show(lines, remaining, sum(expected(run, lines) for run in remaining))
        if not remaining:
            return True
        if clock() - start + expected(remaining[0], lines) > 60 * minutes:
            return False
        append(path, remaining[0], make(remaining[0]))
