"""tfwd-train: trains a language model, or goes on with a run that was stopped."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import Any

import ml_collections
from absl import flags

from tfwd.lm import app
from tfwd.lm.errors import UserError
from tfwd.lm.signals import Stopped, StopRequest

ABOUT = """
Trains an AWD-LSTM language model and shows what came out.

    tfwd-train --config=configs/quickstart.py --workdir=runs/quickstart
    tfwd-train --config=configs/char.py --workdir=runs/mine --config.data.path=FOLDER

A run that was stopped, by Ctrl-C or by anything else, goes on where its last checkpoint stood
when the same command is given again.
"""


def run() -> None:
    """The console script."""
    app.run(main, define, ABOUT, config=True)


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    flags.DEFINE_string(
        "workdir", "", "folder of the run: checkpoints, logs, report", flag_values=values
    )


def main(values: flags.FlagValues) -> int:
    """Trains; returns the exit code."""
    if not values.workdir:
        raise UserError("give a folder for the run, as --workdir=runs/quickstart")
    with StopRequest() as stop:
        try:
            train(values.config, values.workdir, stop)
        except Stopped as stopped:
            lost = stopped.signal_number == signal.SIGPIPE
            with contextlib.suppress(BrokenPipeError):  # as after `2>&1 | head`
                print(
                    f"stopped by {stopped}; the same command, with --workdir={values.workdir}, "
                    "goes on",
                    file=sys.stderr if lost else sys.stdout,
                )
            return stopped.exit_code
    return 0


def train(config: ml_collections.ConfigDict, workdir: str, stop: StopRequest) -> dict[str, Any]:
    """Trains to the end, writes the report and prints it.

    Args:
        config: the configuration, checked.
        workdir: the run's folder; a run that is there is gone on with.
        stop: looked at after every window.

    Returns:
        The summary, as in `report/summary.json`.

    Raises:
        Stopped: a signal came.
        UserError: the text or the folder is wrong, or training failed.
    """
    import keras
    import tensorflow as tf

    from tfwd.lm.corpus import read_corpus
    from tfwd.lm.display import Display, Output
    from tfwd.lm.finish import finish, finished_before, show
    from tfwd.lm.folder import RunFolder
    from tfwd.lm.trainer import Trainer

    if config.training.deterministic:
        tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(config.seed)
    name, vocabulary, texts = read_corpus(config.data)

    output = Output()
    output.gone = stop.output_is_gone
    folder, display = RunFolder(workdir), Display(output)
    folder.open(config, vocabulary)
    try:
        with Trainer(config, len(vocabulary), texts, folder, display, stop) as trainer:
            summary = finished_before(trainer, say=display.line)
            if summary is not None:
                display.line(f"the run in {folder.path} is finished; this is its report")
                show(summary, folder, display)
                return summary
            display.line(
                f"{name}: {len(texts['train']):,} tokens to train on, vocabulary of "
                f"{len(vocabulary):,}; model of {trainer.parameters:,} weights; run in "
                f"{folder.path}"
            )
            progress = trainer.progress
            if progress.step:
                display.line(
                    f"going on from the checkpoint of step {progress.step:,} (epoch "
                    f"{progress.epoch + 1}, window {progress.window})"
                )
            trainer.describe_optimizer()
            with display:
                trainer.train()
                display.line("evaluating the best weights")
                summary = finish(trainer, vocabulary, name)
        show(summary, folder, display)
        return summary
    finally:
        folder.close()
