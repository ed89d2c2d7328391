"""Comparison of methods that keep weights near the pretrained weights, on 300 training texts.

    python experiments/fine_tuning.py --data=FOLDER --plan
    python experiments/fine_tuning.py --data=FOLDER --minutes=20
    python experiments/fine_tuning_table.py

FOLDER has the folders sst2 (train.tsv, valid.tsv, test.tsv) and trec (train.tsv, test.tsv): lines
of text, a tab, and the label. MiniLM is fine-tuned with seven methods, five seeds each.
`fine_tuning_plan.py` has the settings and the order of the runs.

Every finished run is a line in experiments/results/fine_tuning.jsonl. A finished run is not
repeated. You may stop the program at any time. Only the run in progress is lost. The same command
resumes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fine_tuning_plan as planning
import fine_tuning_results_file as lines_file
from fine_tuning_plan import Run
from fine_tuning_results_file import Lines
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

SECONDS = 20.0  # expected seconds of a run before a similar run is finished


def options(description: str, seeds: int) -> argparse.ArgumentParser:
    """Returns the parser of the command line that both frameworks share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2 and trec")
    parser.add_argument(
        "--pretrained", type=Path, default=Path(".venv/minilm"), help="folder of the encoder"
    )
    parser.add_argument(
        "--results", type=Path, default=lines_file.RESULTS, help="file of finished runs"
    )
    parser.add_argument("--seeds", type=int, default=seeds, help="seeds of each method")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="start no run that would end later"
    )
    return parser


def expected(run: Run, lines: Lines) -> float:
    """Returns the expected seconds of a run."""
    return planning.seconds(run, lines, SECONDS)


def show_plan(plan: Sequence[Run], lines: Lines, console: Console) -> None:
    """Prints the numbers of planned and finished runs, and the estimated remaining time."""
    for kind in ("select", "final"):
        runs = [run for run in plan if run.kind == kind]
        remaining = [run for run in runs if run not in lines]
        minutes = sum(expected(run, lines) for run in remaining) / 60
        console.print(
            f"{kind}: {len(runs)} runs, {len(runs) - len(remaining)} finished, "
            f"about {minutes:.0f} minutes left",
            highlight=False,
        )
    console.print(
        "Each process also traces up to 16 training steps. That takes about 2 minutes.",
        highlight=False,
        soft_wrap=True,
    )


def described(run: Run, line: Any) -> str:
    """Returns one line about a finished run."""
    part = "test" if run.kind == "final" else "valid"
    accuracy = line[f"{part}_accuracy"]
    result = "diverged" if accuracy is None else f"{part} {accuracy:.1%}"
    strength = f" {run.strength:g}" if run.strength else ""
    return (
        f"{run.kind} {run.task}, {run.method}{strength}, rate {run.rate:g}, seed {run.seed}: "
        f"{result}, {line['seconds']:.0f} s"
    )


def perform(
    given: argparse.Namespace,
    plan: Callable[[Lines], Sequence[Run]],
    training: Callable[[Path, Path], Any],
    console: Console,
) -> int:
    """Makes the runs with a progress bar, and returns the exit code.

    Args:
        given: Parsed command line.
        plan: Function from the finished runs to all runs, in order.
        training: Class `Training` of a framework.
        console: Console that shows the progress.
    """
    from tfwd.runs.errors import UserError

    try:
        make = training(given.data, given.pretrained)
        lines_file.check_texts(given.results, make.fingerprints)
    except (UserError, ValueError) as error:
        console.print(str(error), style="red", highlight=False, soft_wrap=True)
        return 1
    columns = (
        TextColumn("runs"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("about {task.fields[minutes]:.0f} minutes left"),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=None, minutes=0.0)

        def show(lines: Lines, left: Sequence[Run], seconds: float) -> None:
            total = len(plan(lines))
            following = f"{left[0].kind} {left[0].task} {left[0].method}" if left else ""
            progress.update(
                bar,
                total=total,
                completed=total - len(left),
                minutes=seconds / 60,
                description=following,
            )

        def made(run: Run) -> Any:
            line = make(run)
            progress.console.print(described(run, line), highlight=False)
            return line

        try:
            done = lines_file.carry_out(given.results, plan, made, given.minutes, expected, show)
        except KeyboardInterrupt:
            progress.stop()
            console.print("Stopped. The same command resumes.")
            return 130
    if not done:
        console.print("The time of --minutes is over. The same command resumes.")
    return 0


def main() -> int:
    """Makes the runs, or shows the plan."""
    parser = options(__doc__ or "", planning.SEEDS)
    parser.add_argument("--plan", action="store_true", help="only show the runs and their times")
    given, console = parser.parse_args(), Console()

    def plan(lines: Lines) -> list[Run]:
        return planning.plan(lines, given.seeds)

    if given.plan:
        lines = lines_file.read(given.results)
        show_plan(plan(lines), lines, console)
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from fine_tuning_training import Training

    return perform(given, plan, Training, console)


if __name__ == "__main__":
    sys.exit(main())
