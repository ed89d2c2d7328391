"""Timing, comparison and report of the benchmarks.

Candidates run in turn in one process, so that other programs on the machine slow all candidates
equally. A comparison is the median of the ratios within the rounds. Single times mean little. Each
library gets as many threads as there are cores. The results of a script are a list of `Row`s.
`report` prints the rows as a table, and then as one line of JSON, which `run_all.py` collects.
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

# PyTorch's builds for GPUs load Triton if it is installed. Triton's LLVM crashes a process that has
# loaded TensorFlow's LLVM. On a CPU, PyTorch does not need Triton.
sys.modules.setdefault("triton", None)  # type: ignore[arg-type]

# Progress and tables go to standard error; standard output ends with the JSON line.
CONSOLE = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
# After a turn, the library's threads spin for some milliseconds and slow the next library.
PAUSE = 0.01


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Returns the spread of some values. The quartiles of one value are the value itself."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclasses.dataclass
class Row:
    """One claim and its measurement.

    Attributes:
        claim: The claim in words.
        figure: The measured ratio or share.
        means: Meaning of the figure, such as "time over naive".
        ours: Cost of tfwd's side in `unit`, or None if the figure is enough.
        peers: Costs of the other sides by name, in `unit`. A text is the reason why a cost is
            missing.
        unit: Unit of `ours` and `peers`.
        at_most: Upper limit of the median. At most one of the three goals is given. Without a goal
            the figure is only stated.
        at_least: Lower limit of the median.
        no_more: Upper limit for two sides that do the same work. Their times are equal only within
            the spread. So the lower quartile must not be above the limit.
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
        """True if the goal is reached. None if there is no goal."""
        # The comparison uses the printed figure, which has two decimals.
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
        """Creates a row from a dict of `to_json`."""
        fields = {name: value for name, value in fields.items() if name != "reached"}
        return cls(**{**fields, "figure": Spread(**fields["figure"])})


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def equal_threads() -> int:
    """Gives TensorFlow and PyTorch one thread per core, and returns the number of threads.

    PyTorch must already be imported to get its threads.
    """
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(cores())
    tf.config.threading.set_inter_op_parallelism_threads(cores())
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(cores())
    return cores()


def progress() -> Progress:
    """Returns a progress bar with the current task, the number of finished tasks and the time."""
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
        candidates: Functions by name. Each function waits until its work is done.
        seconds: No new round begins after this time, except for the first `least` rounds.
        rounds: Largest number of rounds. In each round, every candidate has one turn. A different
            candidate begins each round.
        least: Smallest number of rounds.
        calls: Number of calls in a turn. Use several calls if a call takes less than some
            milliseconds. The result is the time of one call.
        warmup: Number of first calls of each candidate that are not timed, because they trace and
            compile.
        title: Title of the progress bar.
        clock: Clock function. Use `time.process_time` if other programs compute on the machine.

    Returns:
        dict from a name to the seconds of one call in each round. Entries with the same index in
        two lists are from the same round.
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
    """Returns the log-log slopes of costs over sizes: median, smallest and largest.

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
    """Returns a row with the ratio of our time to another side's time.

    Args:
        claim: The claim in words.
        times: dict from a side to the seconds of each round.
        ours: Name of our side.
        other: Name of the other side.
        goal: `at_most` or `no_more` of the row.
    """
    median = {side: 1e3 * statistics.median(times[side]) for side in (ours, other)}
    figure = ratio(times[ours], times[other])
    means = f"time over {other}"
    return Row(claim, figure, means, median[ours], {other: median[other]}, **goal)


def module(name: str, what: str) -> Any | None:
    """Returns a module. If it cannot be imported, prints the reason and returns None."""
    return attempt(lambda: importlib.import_module(name), what)


def attempt(make: Callable[[], Any], what: str) -> Any | None:
    """Returns the result of `make`. If `make` fails, prints the reason and returns None.

    Args:
        make: Function that makes a peer.
        what: Name of the peer.
    """
    try:
        return make()
    except Exception as error:
        CONSOLE.print(f"without {what}: {type(error).__name__}: {error}", style="yellow")
        return None


def parser(
    doc: str | None, seconds: float | None = None, of: str = "the rounds"
) -> argparse.ArgumentParser:
    """Returns the command-line parser of a script.

    Args:
        doc: Docstring of the script, which is the description.
        seconds: Default of the flag `--seconds`. None, the default, adds no flag.
        of: Part of the work that `--seconds` limits, for the help text.
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
    """Returns a figure with three digits and its unit. Returns a text unchanged."""
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
        benchmark: Name of the script.
        rows: Results of the script.
        data: Additional entries of the JSON line, such as the points of a plot.
    """
    table = Table(title=benchmark)
    for head in HEADS:
        table.add_column(head)
    for row in rows:
        table.add_row(*cells(row))
    CONSOLE.print(table)
    line = {"benchmark": benchmark, "rows": [row.to_json() for row in rows], **data}
    print(json.dumps(line), flush=True)
