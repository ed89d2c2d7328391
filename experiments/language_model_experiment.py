"""Runs of several variants of one config, with several seeds each, and their results.

The script of an experiment only adds the flags of each kind of run. Runs are independent
`tfwd-train` processes with one thread each. As many processes as cores run at the same time. If the
script is started again, a stopped run resumes, and a finished run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COLOURS = ["#666666", "#3b6ea5", "#c0392b", "#7d5ba6", "#2e8b57", "#b8860b"]


class Experiment(NamedTuple):
    """A comparison of several kinds of runs.

    Attributes:
        name: Name of the experiment, in the line of JSON and in the plot's default file name.
        config: A file in `configs/`.
        variants: dict from a kind of run to its flags, a dict from a config key to its value.
        baseline: Kind that all other kinds are compared with.
        column: Head of the table's first column.
        seeds: Default number of runs of each kind.
        runs: Folder of the runs under `runs/`. Default: the experiment's name. Experiments with the
            same folder share finished runs.
    """

    name: str
    config: str
    variants: Mapping[str, Mapping[str, Any]]
    baseline: str
    column: str
    seeds: int = 3
    runs: str = ""


def options(experiment: Experiment, description: str) -> argparse.Namespace:
    """Returns the parsed command line, which is the same for every experiment."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", required=True, help="folder with train, valid and test text")
    parser.add_argument(
        "--runs", default=f"runs/{experiment.runs or experiment.name}", help="folder for the runs"
    )
    parser.add_argument("--seeds", type=int, default=experiment.seeds, help="runs of each kind")
    parser.add_argument("--parallel", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--plot", default=f"docs/{experiment.name}.png", help="PNG to write")
    parser.add_argument("--set", nargs="*", default=[], help="config flags for all: key=value")
    return parser.parse_args()


def folder(runs: Path, kind: str, seed: int) -> Path:
    """Returns the folder of one run."""
    return runs / f"{kind.replace(' ', '_').replace('/', '_')}-{seed}"


def finished(program: str, config: str, place: Path, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Makes or resumes a run in a separate process, and returns its summary.

    Args:
        program: Name of the program, such as "tfwd-train".
        config: A file in `configs/`.
        place: Folder of the run. The program's output goes to a `.log` file beside the folder.
        flags: dict from a config key to its value.

    Raises:
        CalledProcessError: If the run failed. The `.log` file has the reason.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    command = [
        str(Path(sys.executable).with_name(program)),
        f"--config={config}",
        f"--workdir={place}",
        *(f"--config.{key}={value}" for key, value in flags.items()),
    ]
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    with open(f"{place}.log", "a") as log:
        subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **threads},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=True,
        )
    return json.loads((place / "report" / "summary.json").read_text())


def train(experiment: Experiment, given: argparse.Namespace, kind: str, seed: int) -> dict:
    """Makes a run unless it is finished, and returns its perplexities at the best epoch."""
    place = folder(Path(given.runs).resolve(), kind, seed)
    flags = {"data.path": Path(given.data).resolve(), **experiment.variants[kind], "seed": seed}
    flags.update(pair.split("=", 1) for pair in given.set)
    summary = finished("tfwd-train", experiment.config, place, flags)
    result = {text: summary["texts"][text]["perplexity"] for text in ("train", "valid", "test")}
    print(f"{place.name}: test perplexity {result['test']:.2f}", flush=True)
    return result


def epochs(place: Path) -> list[dict[str, Any]]:
    """Returns the records of the validations of one run."""
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "valid"]


def make(experiment: Experiment, given: argparse.Namespace) -> dict[tuple[str, int], dict]:
    """Makes all runs, seed by seed. So a stopped experiment has some runs of each kind."""
    with ThreadPoolExecutor(given.parallel) as pool:
        futures = {
            (kind, seed): pool.submit(train, experiment, given, kind, seed)
            for seed in range(given.seeds)
            for kind in experiment.variants
        }
        return {key: future.result() for key, future in futures.items()}


def table(experiment: Experiment, results: Mapping[tuple[str, int], dict]) -> tuple[str, dict]:
    """Returns the results in Markdown, and as an object for the line of JSON."""

    def figures(kind: str, text: str) -> list[float]:
        return [result[text] for (name, _), result in results.items() if name == kind]

    base = statistics.mean(figures(experiment.baseline, "test"))
    heads = [experiment.column, "train", "valid", "test, mean ± deviation", "each seed", "change"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    found: dict[str, Any] = {}
    for kind in experiment.variants:
        test = figures(kind, "test")
        mean = statistics.mean(test)
        spread = statistics.stdev(test) if len(test) > 1 else None  # JSON has no NaN
        train_, valid = (statistics.mean(figures(kind, text)) for text in ("train", "valid"))
        found[kind] = {"test": test, "mean": mean, "stdev": spread, "valid": valid}
        shown = "" if spread is None else f" ± {spread:.2f}"
        each = ", ".join(f"{value:.2f}" for value in test)
        lines.append(
            f"| {kind} | {train_:.1f} | {valid:.1f} | {mean:.2f}{shown} | {each} "
            f"| {100 * (mean / base - 1):+.1f} % |"
        )
    return "\n".join(lines), found


def plot(curves: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """Plots validation perplexity by epoch: a thin line per seed, a thick line for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for (kind, lines), colour in zip(curves.items(), COLOURS, strict=False):
        for line in lines:
            axes.plot(range(1, len(line) + 1), line, color=colour, alpha=0.25, lw=1)
        count = min(map(len, lines))
        mean = [statistics.mean(line[i] for line in lines) for i in range(count)]
        axes.plot(range(1, count + 1), mean, color=colour, lw=2, label=kind)
    axes.set(xlabel="epoch", ylabel="validation perplexity", yscale="log")
    # The first epochs are far above the later epochs, and equal for all kinds. So they are cut off.
    axes.set_ylim(top=1.4 * min(min(line) for lines in curves.values() for line in lines))
    axes.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
    axes.yaxis.set_minor_formatter(matplotlib.ticker.ScalarFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3, which="both")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def answer(experiment: Experiment, description: str) -> None:
    """Makes the runs, prints a table in Markdown and a line of JSON, and writes a plot."""
    given = options(experiment, description)
    results = make(experiment, given)
    text, found = table(experiment, results)
    print(text)
    runs = Path(given.runs).resolve()
    curves = {
        kind: [
            [record["perplexity"] for record in epochs(folder(runs, kind, seed))]
            for seed in range(given.seeds)
        ]
        for kind in experiment.variants
    }
    plot(curves, Path(given.plot))
    print(json.dumps({"experiment": experiment.name, "test_perplexity": found}))
