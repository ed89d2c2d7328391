"""Tiny text, model and space for the tests of sweeps."""

import csv
from pathlib import Path

import numpy as np
import pytest

from tfwd.lm.commands import tune as program
from tfwd.runs.storage.progress import Progress

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

SWEEP = """
from tfwd.lm.sweeps import Float, Sweep

def get_sweep():
    return Sweep({"model.weight_dropout": Float(0, 0.7, step=0.1)})
"""

FILE = """
from tfwd.lm.sweeps import Choice, Float, Sweep

def get_sweep():
    return Sweep({space}, {options})
"""
SPACE = '{"model.weight_dropout": Float(0, 0.7, step=0.1)}'


def forget_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the process run alone, whatever the environment says."""
    for name in ("TUNER_ID", "ORACLE_IP", "ORACLE_PORT"):
        monkeypatch.delenv(f"KERASTUNER_{name}", raising=False)


def tune(
    folder: Path,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    space: str = SPACE,
    options: str = "max_trials=2",
    *arguments: str,
    workdir: str = "sweep",
    **training: object,
) -> tuple[int, str, str]:
    """Runs tfwd-tune over a sweep file in this process; returns the exit code and the output."""
    (folder / "sweep.py").write_text(FILE.format(space=space, options=options))
    flags = tiny_flags(folder, root, **{"epochs": 1, **training})
    flags += [f"--sweep={folder / 'sweep.py'}", f"--workdir={folder / workdir}"]
    argv = ["tfwd-tune", *flags, *arguments]
    with pytest.raises(SystemExit) as ended:
        program.run(argv)
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


class NoTraining:
    """A trainer that learns nothing, with 20 windows per epoch."""

    def __init__(self, config, size, texts, folder, display, stop, workers):
        self.progress = Progress(best_loss=2.0 + config.seed)
        self.config, self.display, self.stop = config, display, stop

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def train(self):
        epochs = self.config.training.epochs
        for epoch in range(epochs):
            self.display.epoch(f"epoch {epoch + 1}/{epochs}", 20, 0)
            for window in range(20):
                self.display.window(window + 1, None, None, None)
                if self.stop:
                    raise self.stop.error()
            self.progress.end_epoch(1.0)


def write_text(folder: Path) -> Path:
    """Writes a text of 300 lines; each word but one makes one next word likely."""
    random, path = np.random.default_rng(0), folder / "text.txt"
    lines = []
    for _ in range(300):
        first = int(random.integers(10))
        lines.append(" ".join(WORDS[(first + 3 * i) % 10] for i in range(4)))
    path.write_text("\n".join(lines) + "\n")
    return path


def tiny_flags(folder: Path, root: Path, **training: object) -> list[str]:
    """Returns the flags of a model that trains in a second."""
    settings = {
        "data.path": write_text(folder),
        "data.batch_size": 4,
        "data.eval_batch_size": 2,
        "data.window": 10,
        "model.embedding_dim": 4,
        "model.hidden_units": 4,
        "optimizer.learning_rate": 0.01,
        "training.log_steps": 1,
        "training.checkpoint_seconds": 0,  # a slow machine would save more often
        "sample.tokens": 0,
        **{f"training.{name}": value for name, value in training.items()},
    }
    config = [f"--config.{key}={value}" for key, value in settings.items()]
    return [f"--config={root / 'configs' / 'quickstart.py'}", *config]


def table(folder: Path) -> list[dict[str, str]]:
    """Returns the rows of a sweep's `trials.csv`."""
    with open(folder / "trials.csv", newline="") as file:
        return list(csv.DictReader(file))
