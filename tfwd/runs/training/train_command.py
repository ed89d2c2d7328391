"""Training command: trains a new run or resumes a stopped run."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_collections
from absl import flags

from tfwd.runs.errors import UserError
from tfwd.runs.program_base import Program
from tfwd.runs.storage.file_access import read_json
from tfwd.runs.training.stop_signals import CLOSED_PIPE, Stopped, StopRequest
from tfwd.runs.workers import worker_flags, worker_start

if TYPE_CHECKING:
    from tfwd.runs.training.trainer import Trainer
    from tfwd.runs.workers.worker_group import Workers


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    flags.DEFINE_string(
        "workdir", "", "folder of the run: checkpoints, logs, report", flag_values=values
    )
    worker_flags.define(values)


def main(
    program: Program,
    values: flags.FlagValues,
    work: Callable[[StopRequest, Workers], object] | None = None,
) -> int:
    """Trains, and returns the exit code.

    Args:
        program: the program to train.
        values: the parsed flags.
        work: function that trains instead of `train`. Default: `train`.
    """
    if not values.workdir:
        raise UserError(
            "--workdir is missing; give a folder for the run, such as "
            f"--workdir=runs/{program.schema.example}"
        )
    return worker_start.run_with_workers(
        values,
        program.command,
        lambda workers: _main(program, values, workers, work),
        f"the same command, with --workdir={values.workdir}, resumes",
    )


def _main(
    program: Program,
    values: flags.FlagValues,
    workers: Workers,
    work: Callable[[StopRequest, Workers], object] | None,
) -> int:
    with StopRequest() as stop:
        try:
            if work is None:
                train(program, values.config, values.workdir, stop, workers)
            else:
                work(stop, workers)
        except Stopped as stopped:
            lost = stopped.signal_number == CLOSED_PIPE
            if not workers.is_chief:
                return stopped.exit_code
            with contextlib.suppress(BrokenPipeError):  # such as after `2>&1 | head`
                print(
                    f"stopped by {stopped}; the same command, with --workdir={values.workdir}, "
                    "resumes",
                    file=sys.stderr if lost else sys.stdout,
                )
            return stopped.exit_code
    return 0


def train(
    program: Program,
    config: ml_collections.ConfigDict,
    workdir: str,
    stop: StopRequest,
    workers: Workers | None = None,
) -> dict[str, Any]:
    """Trains to the end, writes the report and prints it.

    Args:
        program: the program to train.
        config: the checked configuration.
        workdir: the run folder. A run in it is resumed.
        stop: the stop request, checked after every step.
        workers: the `Workers` that train together. A single process by default.

    Returns:
        The summary, as in `report/summary.json`.

    Raises:
        Stopped: a signal arrived.
        UserError: the data or the folder is wrong, or training failed.
    """
    import keras
    import tensorflow as tf

    from tfwd.runs.storage.run_folder import RunFolder
    from tfwd.runs.training.display import Display, Output
    from tfwd.runs.workers import worker_agreement
    from tfwd.runs.workers.worker_group import Workers

    workers = workers or Workers()
    if config.training.deterministic:
        tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(config.seed)
    worker_agreement.check_versions(workers)
    worker_agreement.check_config(workers, config)
    data = workers.together(lambda: program.read_data(config))
    worker_agreement.check_data(workers, data)

    output = Output(quiet=not workers.is_chief)
    output.on_reader_gone = stop.output_is_gone
    folder, display = RunFolder(workdir, program), Display(program.score, output)
    open_folder = folder.open if workers.is_chief else folder.follow
    workers.together(lambda: open_folder(config, data.vocabulary))
    try:
        worker_agreement.check_folder(workers, folder.path)
        with program.make_trainer(config, data, folder, display, stop, workers) as trainer:
            summary = workers.on_chief(
                functools.partial(summary_if_finished, program, trainer, say=display.line)
            )
            if summary is not None:
                display.line(f"the run in {folder.path} is finished; this is its report")
                program.show(summary, folder, display)
                return summary
            counted = program.counted.format(len(data.vocabulary))
            display.line(
                f"{data.name}: {data.size} for training, {counted}; model with "
                f"{trainer.parameters:,} weights; run in {folder.path}"
            )
            if workers.count > 1:
                display.line(f"{workers.count} workers divide each batch; the chief shows the run")
            progress = trainer.progress
            if progress.step:
                display.line(
                    f"resuming from the checkpoint of step {progress.step:,} (epoch "
                    f"{progress.epoch + 1}, step {progress.window} of the epoch)"
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


def summary_if_finished(
    program: Program, trainer: Trainer, say: Callable[[str], object] = print
) -> dict[str, Any] | None:
    """Returns the summary of a run that is finished and has a report, or `None`.

    Args:
        program: the program that makes a table of the summary.
        trainer: the trainer of the run.
        say: called with a line if the summary cannot be used and must be made again.
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
        say(f"{error}; the summary is made again")
    except Exception:  # any form that the table cannot show
        say(f"{path} is not a summary of a run; the summary is made again")
    return None


def free_memory() -> None:
    """Frees the memory of a run, before the next run starts.

    The model, its functions and the trainer refer to each other. Keras stores a graph and names.
    """
    import keras

    keras.backend.clear_session()
    gc.collect()
