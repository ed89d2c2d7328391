"""The training program: trains, or goes on with a run that was stopped."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_collections
from absl import flags

from tfwd.runs.errors import UserError
from tfwd.runs.program import Program
from tfwd.runs.storage.files import read_json
from tfwd.runs.training.signals import CLOSED_PIPE, Stopped, StopRequest

if TYPE_CHECKING:
    from tfwd.runs.training.trainer import Trainer


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    flags.DEFINE_string(
        "workdir", "", "folder of the run: checkpoints, logs, report", flag_values=values
    )


def main(
    program: Program,
    values: flags.FlagValues,
    work: Callable[[StopRequest], object] | None = None,
) -> int:
    """Trains; returns the exit code.

    Args:
        program: what is trained.
        values: the flags.
        work: trains in another way than `train` does.
    """
    if not values.workdir:
        name = os.path.splitext(os.path.basename(program.schema.example))[0]
        raise UserError(f"give a folder for the run, as --workdir=runs/{name}")
    with StopRequest() as stop:
        try:
            if work is None:
                train(program, values.config, values.workdir, stop)
            else:
                work(stop)
        except Stopped as stopped:
            lost = stopped.signal_number == CLOSED_PIPE
            with contextlib.suppress(BrokenPipeError):  # as after `2>&1 | head`
                print(
                    f"stopped by {stopped}; the same command, with --workdir={values.workdir}, "
                    "goes on",
                    file=sys.stderr if lost else sys.stdout,
                )
            return stopped.exit_code
    return 0


def train(
    program: Program, config: ml_collections.ConfigDict, workdir: str, stop: StopRequest
) -> dict[str, Any]:
    """Trains to the end, writes the report and prints it.

    Args:
        program: what is trained.
        config: the configuration, checked.
        workdir: the run's folder; a run that is there is gone on with.
        stop: looked at after every window.

    Returns:
        The summary, as in `report/summary.json`.

    Raises:
        Stopped: a signal came.
        UserError: the data or the folder is wrong, or training failed.
    """
    import keras
    import tensorflow as tf

    from tfwd.runs.storage.folder import RunFolder
    from tfwd.runs.training.display import Display, Output

    if config.training.deterministic:
        tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(config.seed)
    data = program.read_data(config)

    output = Output()
    output.gone = stop.output_is_gone
    folder, display = RunFolder(workdir, program), Display(program.score, output)
    folder.open(config, data.vocabulary)
    try:
        with program.make_trainer(config, data, folder, display, stop) as trainer:
            summary = finished_before(program, trainer, say=display.line)
            if summary is not None:
                display.line(f"the run in {folder.path} is finished; this is its report")
                program.show(summary, folder, display)
                return summary
            counted = program.counted.format(len(data.vocabulary))
            display.line(
                f"{data.name}: {data.size} to train on, {counted}; model of "
                f"{trainer.parameters:,} weights; run in {folder.path}"
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
                summary = program.finish(trainer, data)
        program.show(summary, folder, display)
        return summary
    finally:
        folder.close()


def finished_before(
    program: Program, trainer: Trainer, say: Callable[[str], object] = print
) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do, else `None`.

    Args:
        program: makes a table of it.
        trainer: the run.
        say: called with a line if there is a summary that cannot be used; it is made again.
    """
    path = trainer.folder.report / "summary.json"
    if not trainer.finished or not os.path.lexists(path):
        return None
    try:
        summary = read_json(path, "summary")
        if summary["step"] != trainer.progress.step:
            return None
        program.tables(summary)
        return summary
    except UserError as error:
        say(f"{error}; it is made again")
    except Exception:  # any form that the table is not made for
        say(f"{path} is no summary of a run; it is made again")
    return None


def tidy_up() -> None:
    """Gives back what a run held, so that the next one finds the memory as this one did.

    The model, its functions and the trainer hold each other; Keras keeps a graph and names.
    """
    import keras

    keras.backend.clear_session()
    gc.collect()
