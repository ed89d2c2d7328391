"""What weight dropout and variational noise do to a language model's perplexity.

    python experiments/weight_regularization.py --data=FOLDER --runs=runs/evidence

One model and one budget, four ways to regularise the recurrent kernels, several seeds each. FOLDER
has train.txt, valid.txt and test.txt. Runs are independent `tfwd-train` processes, as many at a
time as there are cores, one thread each; what was stopped goes on when the script is started
again. At the end: a table in Markdown, a plot, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/wikitext2_small.py"
VARIANTS = {
    "neither": {"weight_dropout": 0.0, "variational_noise": 0.0},
    "weight dropout 0.5": {"weight_dropout": 0.5, "variational_noise": 0.0},
    "variational noise 0.05": {"weight_dropout": 0.0, "variational_noise": 0.05},
    "both": {"weight_dropout": 0.5, "variational_noise": 0.05},
}
COLOURS = dict(zip(VARIANTS, ["#666666", "#3b6ea5", "#c0392b", "#7d5ba6"], strict=True))


def command(data: str, folder: Path, rates: dict[str, float], seed: int) -> list[str]:
    """The command line of one run."""
    program = Path(sys.executable).with_name("tfwd-train")
    return [
        str(program),
        f"--config={CONFIG}",
        f"--workdir={folder}",
        f"--config.data.path={data}",
        *(f"--config.model.{name}={value}" for name, value in rates.items()),
        f"--config.seed={seed}",
    ]


def train(data: str, folder: Path, rates: dict[str, float], seed: int) -> dict[str, float]:
    """One run, or what it left if it has been made; its perplexities at the best epoch."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    with open(f"{folder}.log", "a") as log:
        subprocess.run(
            command(data, folder, rates, seed),
            cwd=ROOT,
            env={**os.environ, **threads},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=True,
        )
    summary = json.loads((folder / "report" / "summary.json").read_text())
    result = {text: summary["texts"][text]["perplexity"] for text in ("train", "valid", "test")}
    print(f"{folder.name}: test perplexity {result['test']:.2f}", flush=True)
    return result


def curves(folder: Path) -> list[float]:
    """The validation perplexity after each epoch."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["perplexity"] for line in lines if line["kind"] == "valid"]


def plot(folders: dict[str, list[Path]], path: Path) -> None:
    """Validation perplexity by epoch: a thin line a seed, a thick one for their mean."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, runs in folders.items():
        lines = [curves(folder) for folder in runs]
        epochs = range(1, min(map(len, lines)) + 1)
        for line in lines:
            axes.plot(range(1, len(line) + 1), line, color=COLOURS[name], alpha=0.25, lw=1)
        mean = [statistics.mean(line[i - 1] for line in lines) for i in epochs]
        axes.plot(epochs, mean, color=COLOURS[name], lw=2, label=name)
    axes.set(xlabel="epoch", ylabel="validation perplexity", yscale="log")
    axes.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
    axes.yaxis.set_minor_formatter(matplotlib.ticker.ScalarFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3, which="both")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Makes the runs and prints what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with train, valid and test text")
    parser.add_argument("--runs", default="runs/evidence", help="folder for the runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--parallel", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--plot", default="docs/weight_regularization.png", help="PNG to write")
    options = parser.parse_args()
    data, runs = str(Path(options.data).resolve()), Path(options.runs).resolve()

    folders = {
        name: [runs / f"{name.replace(' ', '_')}-{seed}" for seed in range(options.seeds)]
        for name in VARIANTS
    }
    # Seed by seed, so that a run that is stopped half way has something of each kind.
    with ThreadPoolExecutor(options.parallel) as pool:
        futures = {
            (name, seed): pool.submit(train, data, folders[name][seed], rates, seed)
            for seed in range(options.seeds)
            for name, rates in VARIANTS.items()
        }
        results = {key: future.result() for key, future in futures.items()}

    def figures(name: str, key: str) -> list[float]:
        return [results[name, seed][key] for seed in range(options.seeds)]

    base = statistics.mean(figures("neither", "test"))
    table, rows = {}, []
    for name in VARIANTS:
        test = figures(name, "test")
        mean = statistics.mean(test)
        spread = statistics.stdev(test) if len(test) > 1 else math.nan
        valid = statistics.mean(figures(name, "valid"))
        train_ = statistics.mean(figures(name, "train"))
        table[name] = {"test": test, "mean": mean, "stdev": spread, "valid": valid}
        each = ", ".join(f"{value:.2f}" for value in test)
        rows.append(
            f"| {name} | {train_:.1f} | {valid:.1f} | {mean:.2f} ± {spread:.2f} | {each} "
            f"| {100 * (mean / base - 1):+.1f} % |"
        )
    heads = ["recurrent kernels", "train", "valid", "test, mean ± deviation", "each seed", "change"]
    print(f"| {' | '.join(heads)} |")
    print("|---|---|---|---|---|---|")
    print("\n".join(rows))
    plot(folders, Path(options.plot))
    print(json.dumps({"experiment": "weight_regularization", "test_perplexity": table}))


if __name__ == "__main__":
    main()
