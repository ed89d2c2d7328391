"""What holding weights to the pretrained ones does to a fine-tuning on few texts.

    python experiments/fine_tuning.py --data=FOLDER --pretrained=.venv/minilm

FOLDER has the folders sst2 (train.tsv, valid.tsv, test.tsv) and trec (train.tsv, test.tsv). MiniLM
is fine-tuned on parts of them, in several ways of regularisation, with several seeds each:

1. the plain way with each learning rate, two seeds each: the rate with the lowest mean loss on the
   validation texts is the common one;
2. at that rate, each strength of a way that has several, two seeds each: again the validation texts
   choose;
3. every way at the common rate, with all seeds;
4. every way with each learning rate, two seeds each, and with all seeds at its best.

What was stopped goes on when the script is started again, and what is finished is not made again.
Of a run its summary and its log are kept. --stages=0 makes no runs, and shows what there is.

At the end: a table in Markdown for each text and size, a plot, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import runs
from fine_tuning_table import Row, plot, table

RATES = (5e-5, 1e-4, 2e-4, 4e-4)
TRIALS = 2  # seeds by which a rate or a strength is chosen
EPOCHS = {300: 5, 1000: 4, 0: 3}  # by the number of texts to train on; 0 is all
VALID = 300  # texts of validation

OFF = {
    **dict.fromkeys(("model.dropout", "model.attention_dropout", "model.head_dropout"), 0.0),
    "model.pooling": "mean",
    "optimizer.weight_decay": 0.0,
    "optimizer.decay_include": "",
    "optimizer.layer_decay": 1.0,
    "data.batch_size": 16,
    "data.max_length": 64,
    "report.examples": 0,
}


def _decay(strength: float, towards: str) -> dict[str, Any]:
    return {
        "optimizer.weight_decay": strength,
        "optimizer.decay_scale": "learning_rate",
        "optimizer.decay_include": "stack/.*kernel",
        "optimizer.decay_towards": towards,
    }


def _noise(strength: float) -> dict[str, Any]:
    return {"model.noise": strength, "model.noise_scale": "deviation"}


def _dropout(rate: float) -> dict[str, Any]:
    return dict.fromkeys(("model.dropout", "model.attention_dropout", "model.head_dropout"), rate)


# Each way with its strengths: what is said of a strength -> config flags.
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {"": {}},
    "dropout": {"0.1": _dropout(0.1)},
    "weight dropout": {str(r): {"model.weight_dropout": r} for r in (0.1, 0.3)},
    "Mixout 0.5": {"": {"model.mixout": 0.5}},
    "Mixout 0.7": {"": {"model.mixout": 0.7}},
    "Mixout 0.9": {"": {"model.mixout": 0.9}},
    "decay to zero": {str(d): _decay(d, "zero") for d in (3.0, 30.0)},
    "decay to start": {str(d): _decay(d, "start") for d in (3.0, 30.0)},
    "noise": {str(s): _noise(s) for s in (0.05, 0.15)},
}


class Case(NamedTuple):
    """A text, and how many of its training texts are used; 0 for all."""

    text: str
    examples: int

    def __str__(self) -> str:
        return f"{self.text}, {self.examples or 'all'}"


class Run(NamedTuple):
    """One fine-tuning."""

    case: Case
    way: str
    strength: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        case = f"{self.case.text}-{self.case.examples or 'all'}"
        way = f"{self.way}-{self.strength}".strip("-").replace(" ", "_")
        return f"{case}/{way}-{self.rate:g}/{self.seed}"


class Runs:
    """Makes runs, several at a time, and keeps their summaries."""

    def __init__(self, given: argparse.Namespace):
        self.given = given
        self.folder = Path(given.runs).resolve()

    def found(self, run: Run) -> dict[str, Any] | None:
        """The summary of a run that was made."""
        path = self.folder / f"{run.name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def make(self, wanted: Iterable[Run]) -> None:
        """Makes those that have not been made, in this order."""
        due = [run for run in wanted if self.found(run) is None]
        with ThreadPoolExecutor(self.given.parallel) as pool:
            for number, summary in enumerate(pool.map(self._make, due), 1):
                test = summary["texts"]["test"]["accuracy"]
                print(f"{number} of {len(due)}  {due[number - 1].name}  {test:.2%}", flush=True)

    def _make(self, run: Run) -> dict[str, Any]:
        place = self.folder / run.name
        flags = {
            **OFF,
            **WAYS[run.way][run.strength],
            "data.path": self._data(run.case),
            "model.pretrained": Path(self.given.pretrained).resolve(),
            "optimizer.learning_rate": run.rate,
            "training.epochs": EPOCHS[run.case.examples],
            "seed": run.seed,
        }
        try:
            summary = runs.finished("tfwd-finetune", "configs/finetune.py", place, flags)
        except subprocess.CalledProcessError:
            diverged = place / "report" / "non_finite.txt"
            if not diverged.exists():
                raise
            summary = {"texts": None, "diverged": diverged.read_text()}
        path = self.folder / f"{run.name}.json"
        path.with_suffix(".writing").write_text(json.dumps(summary))
        os.replace(path.with_suffix(".writing"), path)
        shutil.rmtree(place)  # half a gigabyte of weights
        return summary

    def _data(self, case: Case) -> Path:
        """The folder with the texts of a case: always the same ones."""
        place = self.folder / "data" / f"{case.text}-{case.examples or 'all'}"
        source = Path(self.given.data) / case.text
        if not (place / "test.tsv").exists():
            place.mkdir(parents=True, exist_ok=True)
            train = _lines(source / "train.tsv")
            order = np.random.default_rng(0).permutation(len(train))
            valid = source / "valid.tsv"
            if valid.exists():
                held = _lines(valid)
                held = [held[i] for i in np.random.default_rng(0).permutation(len(held))[:VALID]]
            else:
                held, order = [train[i] for i in order[:VALID]], order[VALID:]
            chosen = [train[i] for i in order[: case.examples or None]]
            (place / "train.tsv").write_text("".join(chosen))
            (place / "valid.tsv").write_text("".join(held))
            shutil.copyfile(source / "test.tsv", place / "test.tsv")
        return place


def _lines(path: Path) -> list[str]:
    return [f"{line}\n" for line in path.read_text().rstrip("\n").split("\n")]


def loss(made: Runs, trials: Iterable[Run]) -> float:
    """The mean loss of several runs on the validation texts; infinite if one is missing."""
    found = [made.found(run) for run in trials]
    if not all(summary and summary["texts"] for summary in found):
        return math.inf
    return statistics.mean(summary["texts"]["valid"]["loss"] for summary in found if summary)


class Choice(NamedTuple):
    """What the validation texts of a case say, as far as there are runs."""

    common: float  # the learning rate of the plain way
    strengths: dict[str, str]
    rates: dict[str, float]


def trials(case: Case, way: str, strength: str, rate: float) -> list[Run]:
    """The runs by which something is chosen."""
    return [Run(case, way, strength, rate, seed) for seed in range(TRIALS)]


def choose(made: Runs, case: Case) -> Choice:
    """The best rates and strengths of a case; the first ones where nothing has been made."""
    common = min(RATES, key=lambda rate: loss(made, trials(case, "plain", "", rate)))
    strengths = {
        way: min(given, key=lambda s, way=way: loss(made, trials(case, way, s, common)))
        for way, given in WAYS.items()
    }
    rates = {
        way: min(
            (common, *RATES),
            key=lambda rate, way=way: loss(made, trials(case, way, strengths[way], rate)),
        )
        for way in WAYS
    }
    return Choice(common, strengths, rates)


def make(made: Runs, cases: list[Case], stages: Iterable[int], seeds: int) -> None:
    """All runs, stage by stage."""
    if 1 in stages:
        made.make(r for c in cases for rate in RATES for r in trials(c, "plain", "", rate))
    if 2 in stages:
        chosen = {case: choose(made, case).common for case in cases}
        made.make(
            run
            for case in cases
            for way, given in WAYS.items()
            for strength in given
            for run in trials(case, way, strength, chosen[case])
        )
    if 3 in stages:
        made.make(runs_at(made, cases, seeds, lambda choice, _: choice.common))
    if 4 in stages:
        choices = {case: choose(made, case) for case in cases}
        made.make(
            run
            for case in cases
            for way, strength in choices[case].strengths.items()
            for rate in RATES
            for run in trials(case, way, strength, rate)
        )
        made.make(runs_at(made, cases, seeds, lambda choice, way: choice.rates[way]))


def runs_at(made: Runs, cases: list[Case], seeds: int, rate: Any) -> list[Run]:
    """The runs of all ways with all seeds; seed by seed, so that half of them have all ways."""
    choices = {case: choose(made, case) for case in cases}
    return [
        Run(case, way, strength, rate(choices[case], way), seed)
        for seed in range(seeds)
        for case in cases
        for way, strength in choices[case].strengths.items()
    ]


def rows(made: Runs, case: Case, seeds: int, best: bool) -> list[Row]:
    """What came of each way, at the common rate or at its best."""
    choice, found = choose(made, case), []
    for way, strength in choice.strengths.items():
        rate = choice.rates[way] if best else choice.common
        row = Row(f"{way} {strength}".strip(), rate, [], {}, 0)
        failed = 0
        for seed in range(seeds):
            summary = made.found(Run(case, way, strength, rate, seed))
            if summary is None:
                continue
            texts = summary["texts"]
            valid = texts["valid"]["accuracy"] if texts else 0.0
            failed += not texts or valid <= texts["valid"]["majority"]
            row.valid.append(100 * valid)
            row.test[seed] = 100 * texts["test"]["accuracy"] if texts else 0.0
        if row.test:
            found.append(row._replace(failed=failed))
    return found


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="folder with sst2 and trec")
    parser.add_argument("--pretrained", default=".venv/minilm", help="folder of the encoder")
    parser.add_argument("--runs", default="runs/fine_tuning", help="folder for the runs")
    parser.add_argument("--texts", nargs="*", default=["trec", "sst2"], help="of these")
    parser.add_argument(
        "--examples", type=int, nargs="*", choices=list(EPOCHS), default=[300], help="0: all"
    )
    parser.add_argument("--seeds", type=int, default=10, help="runs of each way")
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 2, 3, 4], help="see above")
    parser.add_argument("--parallel", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--plot", default="docs/fine_tuning.png", help="PNG to write")
    return parser.parse_args()


def main() -> None:
    """Makes the runs; prints the tables and a line of JSON; writes the plot."""
    given = options()
    made = Runs(given)
    cases = [Case(text, examples) for examples in given.examples for text in given.texts]
    make(made, cases, given.stages, given.seeds)
    found = {}
    for case in cases:
        both = tuple(rows(made, case, given.seeds, best) for best in (False, True))
        if both[0]:
            found[str(case)] = both
    for case, (common, best) in found.items():
        print(f"\n{case}, one rate for all:\n\n{table(common)}")
        print(f"\n{case}, each way's best rate:\n\n{table(best)}")
    if found:
        plot(found, Path(given.plot))
    line = {
        case: {row.way: {"rate": row.rate, "test": row.test} for row in best}
        for case, (_, best) in found.items()
    }
    print(json.dumps({"experiment": "fine_tuning", "test_accuracy": line}))


if __name__ == "__main__":
    main()
