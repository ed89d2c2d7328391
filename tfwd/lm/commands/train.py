"""tfwd-train: trains a language model, or resumes a stopped run."""

from __future__ import annotations

from typing import Any

import ml_collections
from absl import flags

from tfwd.lm.program import PROGRAM
from tfwd.runs import command_runner
from tfwd.runs.training import train_command as training
from tfwd.runs.training.stop_signals import StopRequest
from tfwd.runs.training.train_command import define

ABOUT = """
Trains an AWD-LSTM language model and shows its results.

    tfwd-train --config=quickstart --workdir=runs/quickstart
    tfwd-train --config=char --workdir=runs/mine --config.data.path=FOLDER

The same command resumes a stopped run from its last checkpoint.
"""


def run() -> None:
    """Runs the console script."""
    command_runner.run(main, define, ABOUT, schema=PROGRAM.schema)


def main(values: flags.FlagValues) -> int:
    """Trains, and returns the exit code."""
    return training.main(PROGRAM, values)


def train(config: ml_collections.ConfigDict, workdir: str, stop: StopRequest) -> dict[str, Any]:
    """Trains a language model, as `tfwd.runs.training.train_command.train` does."""
    return training.train(PROGRAM, config, workdir, stop)
