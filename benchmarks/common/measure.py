"""Timing, comparison and report of the benchmarks.

Candidates run in turn in one process, so that other programs on the machine slow all candidates
alike. A comparison is the median of the ratios within the rounds; single times mean little. Each
library gets as many threads as there are cores. The results of a script are a list of `Row`s.
`report` prints them as a table and, last, as one line of JSON, which `run_all.py` collects.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# PyTorch's builds for GPUs load Triton if it is installed. Triton's LLVM ends a process that has
# loaded TensorFlow's LLVM. On a CPU nothing needs Triton.
sys.modules.setdefault("triton", None)  # type: ignore[arg-type]

# Progress and tables go to standard error; standard output ends with the JSON line.
CONSOLE = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
# After its turn a library's threads spin for some milliseconds on the cores of the next library.
PAUSE = 0.01


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Returns the spread of some values. One value is its own quartiles."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclasses.dataclass
class Row:
    """One claim and its measurement.

    Attributes:
        claim: the claim in words.
        figure: the measured ratio or share.
        means: meaning of the figure, such as "time over naive".
        ours: tfwd's side in `unit`, or None where the figure is enough.
        peers: the other sides by name, in `unit`; a text says why there is no figure.
        unit: unit of `ours` and `peers`.
        at_most: goal for the median. At most one of the three goals is given. Without a goal the
            figure is only stated.
        at_least: goal for the median.
        no_more: goal for two sides that do the same work. They measure alike only within the
            spread, so the lower quartile must not be above the goal.
    """

    claim: str
    figure: Spread
    means: str
    ours: float | None = None
    peers: dict[str, float | str] = dataclasses.field(default_factory=dict)
    unit: str = "ms"
    at_most: float | None = None
    at_least: float | None = None
    no_more: float | None = None

    @property
    def reached(self) -> bool | None:
        """Tells whether the median is where it must be; None if there is no goal."""
        # The comparison uses the printed figure: two decimals.
        median = round(self.figure.median, 2)
        if self.at_most is not None:
            return median <= self.at_most
        if self.at_least is not None:
            return median >= self.at_least
        if self.no_more is not None:
            return round(self.figure.low, 2) <= self.no_more
        return None

    def to_json(self) -> dict[str, Any]:
        """Returns all attributes, and `reached`."""
        fields = dataclasses.asdict(self)
        return {**fields, "figure": self.figure._asdict(), "reached": self.reached}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Row:
        """Returns the row of a dict that `to_json` made."""
        fields = {name: value for name, value in fields.items() if name != "reached"}
        return cls(**{**fields, "figure": Spread(**fields["figure"])})


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def equal_threads() -> int:
    """Gives TensorFlow and PyTorch one thread per core, and returns the number of threads.

    PyTorch gets its threads only if it is imported already.
    """
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(cores())
    tf.config.threading.set_inter_op_parallelism_threads(cores())
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(cores())
    return cores()


def progress() -> Progress:
    """Returns a progress bar with the current task, the number of finished ones and the time."""
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=CONSOLE, transient=True)


def alternate(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    seconds: float = 15.0,
    rounds: int = 40,
    least: int = 5,
    calls: int = 1,
    warmup: int = 2,
    title: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Runs the candidates in turn and times each run.

    Args:
        candidates: functions by name; each waits until its work is done.
        seconds: no new round begins after this time, except for the first `least` rounds.
        rounds: the most rounds. In each round every candidate has one turn. A different candidate
            begins each round.
        least: the fewest rounds.
        calls: calls in a turn, for work of less than some milliseconds. The result is the time of
            one call.
        warmup: calls of each candidate that are made first and not timed: tracing and compiling.
        title: title of the progress bar.
        clock: the clock; `time.process_time` where other programs compute on the machine.

    Returns:
        By name, the seconds of one call in each round. The same index in two lists is the same
        round.
    """
    names = list(candidates)
    measured: dict[str, list[float]] = {name: [] for name in names}
    with progress() as bar:
        task = bar.add_task(f"{title}: warming up", total=rounds)
        for name in names:
            for _ in range(warmup):
                candidates[name]()
        start = time.perf_counter()
        enabled = gc.isenabled()
        gc.disable()
        try:
            for turn in range(rounds):
                if turn >= least and time.perf_counter() - start > seconds:
                    break
                first = turn % len(names)
                for name in names[first:] + names[:first]:
                    bar.update(task, description=f"{title}: {name}")
                    time.sleep(PAUSE)
                    begin = clock()
                    for _ in range(calls):
                        candidates[name]()
                    measured[name].append((clock() - begin) / calls)
                bar.advance(task)
        finally:
            if enabled:
                gc.enable()
    for name, value in milliseconds(measured).items():
        CONSOLE.print(f"{title}: {name} {number(value, 'ms')}", highlight=False)
    return measured


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Returns the spread of `above / below`, round by round."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def exponents(sizes: Sequence[float], costs: Sequence[float]) -> Spread:
    """Returns the log-log slopes of costs over sizes: median, least and greatest.

    The slope between two neighbours is `log(cost_2 / cost_1) / log(size_2 / size_1)`.
    """
    slopes = [
        math.log(costs[i + 1] / costs[i]) / math.log(sizes[i + 1] / sizes[i])
        for i in range(len(costs) - 1)
    ]
    return Spread(statistics.median(slopes), min(slopes), max(slopes))


def milliseconds(times: Mapping[str, Sequence[float]]) -> dict[str, float | str]:
    """Returns the median of each list of seconds, in milliseconds."""
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def time_over(
    claim: str, times: Mapping[str, Sequence[float]], ours: str, other: str, **goal: float | None
) -> Row:
    """Returns the row of our time over another side's time.

    Args:
        claim: the claim in words.
        times: by side, the seconds of each round.
        ours: our side.
        other: the other side.
        goal: `at_most` or `no_more` of the row.
    """
    median = {side: 1e3 * statistics.median(times[side]) for side in (ours, other)}
    figure = ratio(times[ours], times[other])
    means = f"time over {other}"
    return Row(claim, figure, means, median[ours], {other: median[other]}, **goal)


def module(name: str, what: str) -> Any | None:
    """Returns a module, or None if it cannot be imported, and prints the reason."""
    return attempt(lambda: importlib.import_module(name), what)


def attempt(make: Callable[[], Any], what: str) -> Any | None:
    """Returns what `make` returns, or None if it fails, and prints the reason.

    Args:
        make: makes a peer.
        what: the peer's name.
    """
    try:
        return make()
    except Exception as error:
        CONSOLE.print(f"without {what}: {type(error).__name__}: {error}", style="yellow")
        return None


def parser(
    doc: str | None, seconds: float | None = None, of: str = "the rounds"
) -> argparse.ArgumentParser:
    """Returns the command line of a script.

    Args:
        doc: the script's docstring, which describes it.
        seconds: default of `--seconds`. None: the script does not have this flag.
        of: the part of the work that `--seconds` is for.
    """
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if seconds is not None:
        options.add_argument("--seconds", type=float, default=seconds, help=f"time for {of}")
    return options


def goal(row: Row) -> str:
    """Returns the goal in words."""
    if row.at_most is not None:
        return f"at most {row.at_most:.2f}"
    if row.no_more is not None:
        return f"{row.no_more:.2f} within the spread"
    return "stated" if row.at_least is None else f"at least {row.at_least:.2f}"


def verdict(row: Row) -> str:
    """Returns "yes" or "no", or an empty text if the row has no goal."""
    return {True: "yes", False: "no", None: ""}[row.reached]


def number(value: float | str | None, unit: str = "") -> str:
    """Returns a figure with three digits and its unit. A text stays as it is."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}".rstrip()


HEADS = ("claim", "to reach", "ours", "peers", "ratio", "spread", "reached")


def cells(row: Row) -> Iterable[str]:
    """Returns the cells of a row under `HEADS`."""
    low, high = row.figure.low, row.figure.high
    peers = ", ".join(f"{name} {number(value, row.unit)}" for name, value in row.peers.items())
    figure = f"{row.figure.median:.2f} ({row.means})"
    spread = f"{low:.2f} to {high:.2f}"
    return row.claim, goal(row), number(row.ours, row.unit), peers, figure, spread, verdict(row)


def report(benchmark: str, rows: Sequence[Row], **data: Any) -> None:
    """Prints the rows as a table on the terminal, and then as one line of JSON.

    Args:
        benchmark: the script's name.
        rows: the script's results.
        data: further entries of the JSON line, such as the points of a plot.
    """
    table = Table(title=benchmark)
    for head in HEADS:
        table.add_column(head)
    for row in rows:
        table.add_row(*cells(row))
    CONSOLE.print(table)
    line = {"benchmark": benchmark, "rows": [row.to_json() for row in rows], **data}
    print(json.dumps(line), flush=True)
