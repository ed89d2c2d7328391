"""Repeats a run with N seeds and compares: mean, spread and failed runs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_collections
from absl import flags
from rich import box
from rich.table import Table

from tfwd.runs.errors import UserError
from tfwd.runs.program_base import Program
from tfwd.runs.storage.file_access import write_file
from tfwd.runs.storage.folder_lock import FolderLock
from tfwd.runs.training import train_command as training
from tfwd.runs.training.stop_signals import StopRequest

if TYPE_CHECKING:
    from tfwd.runs.workers.worker_group import Workers


class Outcome(NamedTuple):
    """Result of the run with one seed.

    Attributes:
        seed: int. The seed.
        numbers: dict of float, from the run's summary. Empty if the run failed.
        failed: str. The reason why the run failed; "" if it succeeded.
    """

    seed: int
    numbers: dict[str, float]
    failed: str


# Function of a summary. Returns the numbers to compare, and why the run failed ("" for success).
ReadSummary = Callable[[dict[str, Any]], tuple[dict[str, float], str]]


def define(values: flags.FlagValues) -> None:
    """Defines the flag `--seeds`."""
    flags.DEFINE_integer(
        "seeds",
        1,
        "number of runs with consecutive seeds from the config's seed, each in a folder of the "
        "workdir",
        lower_bound=1,
        upper_bound=1000,
        flag_values=values,
    )


def train(
    program: Program,
    config: ml_collections.ConfigDict,
    workdir: str,
    count: int,
    stop: StopRequest,
    read: ReadSummary,
    workers: Workers | None = None,
) -> list[Outcome]:
    """Trains with `count` consecutive seeds, starting with `config.seed`, and compares the runs.

    Each run has its own folder, `seed-N`, in the workdir. A stopped run resumes, and a finished run
    is not repeated. A run that diverges counts as failed, and the next run starts. The report is
    `seeds.json` in the workdir.

    Args:
        program: the program to train.
        config: the checked configuration.
        workdir: the folder of all runs.
        count: int. The number of seeds.
        stop: as in `training.train`.
        read: function that reads the numbers to compare from a summary.
        workers: the `Workers` that train together. A single process by default.

    Raises:
        Stopped: a signal arrived.
        UserError: as in `training.train`, except for a run that diverges. Also if the workdir holds
            a single run.
    """
    from tfwd.runs.training.display import Output
    from tfwd.runs.training.non_finite_steps import Diverged  # loads TensorFlow; not for --help
    from tfwd.runs.workers.worker_group import Workers

    folder = Path(workdir)
    if (folder / "config.json").exists():
        raise UserError(
            f"the workdir {folder} holds a single run: give another --workdir for --seeds={count}"
        )
    workers = workers or Workers()
    output = Output(quiet=not workers.is_chief)
    output.on_reader_gone = stop.output_is_gone
    busy = f"another process is training in the workdir {folder}"
    lock = workers.together(lambda: FolderLock(folder, busy) if workers.is_chief else None)
    begun = False
    try:
        outcomes: list[Outcome] = []
        for seed in range(config.seed, config.seed + count):
            seed_config = config.copy_and_resolve_references()
            seed_config.seed = seed
            program.schema.lock(seed_config)
            output.print(f"seed {seed}, {len(outcomes) + 1} of {count}", highlight=False)
            try:
                run_folder = str(folder / f"seed-{seed}")
                numbers, failed = read(
                    training.train(program, seed_config, run_folder, stop, workers)
                )
            except Diverged as error:
                numbers, failed = {}, error.short
                output.print(f"failed: {error}", markup=False, highlight=False, soft_wrap=True)
            finally:
                training.free_memory()
            begun = True
            outcomes.append(Outcome(seed, numbers, failed))
        content = {"runs": [o._asdict() for o in outcomes], "together": compare(outcomes)}
        if workers.is_chief:
            write_file(folder / "seeds.json", json.dumps(content, indent=2) + "\n")
        output.print(table(outcomes))
        wrong = [str(outcome.seed) for outcome in outcomes if outcome.failed]
        which = f": seed {', '.join(wrong)}" if wrong else ""
        output.print(
            f"{len(wrong)} of {count} runs failed{which}; the report is {folder / 'seeds.json'}",
            highlight=False,
            soft_wrap=True,
        )
        return outcomes
    finally:
        if lock is not None:
            lock.release(used=begun or any(folder.glob("seed-*")))


def compare(outcomes: list[Outcome]) -> dict[str, dict[str, float | None]]:
    """Returns mean, spread, minimum and maximum of each number, over the runs that succeeded.

    The spread is the standard deviation of a sample, with n - 1. It is None for a single run.

    Example:
    >>> runs = [Outcome(0, {"accuracy": 0.5}, ""), Outcome(1, {"accuracy": 0.75}, "")]
    >>> compare(runs)["accuracy"]["mean"]
    0.625
    """
    found = {}
    for name in dict.fromkeys(name for outcome in outcomes for name in outcome.numbers):
        values = [o.numbers[name] for o in outcomes if math.isfinite(o.numbers.get(name, math.nan))]
        if values:
            found[name] = {
                "mean": statistics.fmean(values),
                "spread": statistics.stdev(values) if len(values) > 1 else None,
                "least": min(values),
                "most": max(values),
            }
    return found


def table(outcomes: list[Outcome]) -> Table:
    """Returns a table with a row per seed, and with rows for mean and spread below."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("seed")
    of_all = compare(outcomes)
    for name in of_all:
        made.add_column(name, justify="right")
    made.add_column("")
    for outcome in outcomes:
        shown = [_number(outcome.numbers.get(name)) for name in of_all]
        remark = f"failed: {outcome.failed}" if outcome.failed else ""
        made.add_row(str(outcome.seed), *shown, remark)
    made.add_section()
    for row in ("mean", "spread"):
        made.add_row(row, *[_number(numbers[row]) for numbers in of_all.values()], "")
    return made


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.4f}"
