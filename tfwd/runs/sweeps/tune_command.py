"""Sweep command: searches over config keys, alone or with workers on other machines."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import sys
from typing import TYPE_CHECKING, Any

from absl import flags

from tfwd.runs.errors import UserError
from tfwd.runs.program_base import Program
from tfwd.runs.training.stop_signals import CLOSED_PIPE, Stopped, StopRequest

if TYPE_CHECKING:
    from tfwd.runs.sweeps.sweep import Sweep


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""

    def text(name: str, default: str, about: str) -> None:
        flags.DEFINE_string(name, default, about, flag_values=values)

    def number(name: str, about: str, least: int) -> None:
        flags.DEFINE_integer(name, None, about, lower_bound=least, flag_values=values)

    text("sweep", "", "name of a sweep of tfwd, such as rates, or a Python file with get_sweep()")
    text("workdir", "", "folder of the sweep: trials, tables, plots, the best configuration")
    text("method", "", "random, grid, bayesian or hyperband; default: the sweep file's method")
    number("max_trials", "maximum number of trials; default: the sweep file's number", 1)
    number("executions_per_trial", "runs per trial; default: the sweep file's number", 1)
    number("search_seed", "seed of the search; default: the sweep file's seed", 0)

    def seconds(name: str, default: float, about: str) -> None:
        flags.DEFINE_float(
            name, default, about, lower_bound=1.0, upper_bound=1e6, flag_values=values
        )

    flags.DEFINE_bool(
        "dry_run", False, "print the space and the number of trials", flag_values=values
    )
    flags.DEFINE_bool(
        "overwrite", False, "remove an existing sweep in the workdir", flag_values=values
    )
    seconds(
        "worker_timeout",
        60.0,
        "seconds of silence after which the chief gives a worker's trial to another worker",
    )
    seconds("chief_timeout", 300.0, "seconds that a worker waits for the chief's first answer")


def main(program: Program, values: flags.FlagValues) -> int:
    """Searches, and returns the exit code."""
    _require("keras_tuner", "keras-tuner")
    for name in ("worker_timeout", "chief_timeout"):
        if math.isnan(getattr(values, name)):  # NaN is within all bounds
            raise UserError(f"--{name}=nan: give a number of seconds, at least 1")
    if not values.sweep:
        raise UserError("--sweep is missing; give a name or a file, such as --sweep=rates")
    from tfwd.runs.sweeps.sweep import check, load_sweep

    sweep = _with_flags(load_sweep(values.sweep, program.schema), values)
    notes = check(sweep, values.config, program.schema)
    if sweep.method == "bayesian":
        _require("sklearn", "scikit-learn")
        _require("scipy", "SciPy")
    _oracle(sweep, values.config)  # raises an error if the method's own numbers are wrong
    if values.dry_run:
        return dry_run(sweep, values.config, notes)
    if not values.workdir:
        raise UserError(
            "--workdir is missing; give a folder for the sweep, such as --workdir=runs/rates"
        )
    return search(program, sweep, values, notes)


def dry_run(sweep: Sweep, config: Any, notes: list[str]) -> int:
    """Prints the space and the number of trials."""
    from tfwd.runs.sweeps.report import plan, space_table
    from tfwd.runs.training.display import Output

    console = Output()
    console.print(space_table(sweep, config))
    for line in [*plan(sweep, _oracle(sweep, config), config.training.epochs), *notes]:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return 0


def search(program: Program, sweep: Sweep, values: flags.FlagValues, notes: list[str]) -> int:
    """Runs the sweep, or this process's part of the sweep.

    Returns:
        The exit code: 0 for success, 1 if no trial is done, 130 or 143 after a signal.

    Raises:
        UserError: the data, the folder or its sweep is wrong, or the disk is full.
    """
    import tensorflow as tf

    from tfwd.runs.sweeps import report, tensorboard_hparams, trial_rows
    from tfwd.runs.sweeps.live_table import Board
    from tfwd.runs.sweeps.sweep_folder import SweepFolder, describe
    from tfwd.runs.sweeps.tuner import RunTuner, SweepEnd
    from tfwd.runs.training.display import Output
    from tfwd.tuning import chief_and_workers

    config = values.config
    if config.training.deterministic:
        tf.config.experimental.enable_op_determinism()
    try:
        role = chief_and_workers.role()
        chief_and_workers.check_address(role)
    except ValueError as error:
        raise UserError(str(error)) from error
    timeout = None if role == chief_and_workers.ALONE else values.worker_timeout
    data = program.read_data(config)
    stop = StopRequest()
    output = Output()
    output.on_reader_gone = stop.output_is_gone
    if role == chief_and_workers.WORKER:
        _wait_for_chief(values.chief_timeout, output, stop)
    folder = SweepFolder(values.workdir, program)
    description = describe(sweep, config, data.fingerprint())
    again = False
    if role != chief_and_workers.WORKER:
        again = folder.open(description, values.overwrite)
    elif folder.description.exists():
        folder.verify(description)
    try:
        seeds = [config.seed + number for number in range(sweep.executions_per_trial)]
        whole = role != chief_and_workers.WORKER
        board = Board(sweep.space, folder, config.training.epochs, seeds, output, whole=whole)
        oracle = _oracle(sweep, config, timeout)
        board.total = report.trial_count(sweep, oracle)
        try:
            tuner = RunTuner(oracle, sweep, config, data, folder, board, stop, timeout)
        except ValueError as error:  # the folder's files are damaged, or belong to another sweep
            raise UserError(str(error)) from error

        def write_table() -> None:
            done = sorted(board.rows.values(), key=lambda row: int(row.trial))
            trial_rows.write_csv(done, sweep.space, folder)

        if role != chief_and_workers.WORKER:
            board.changed = write_table
            for trial in oracle.trials.values():
                _add_resumed_trial(board, trial, folder)
            board.mark_stopped()
        _print_header(board, sweep, config, data, folder, notes, role, again)
        if role != chief_and_workers.WORKER:
            folder.begin(description)
            tensorboard_hparams.write_space(folder.tensorboard, sweep.space, program.score)
        code = 0
        try:
            with board:
                _run_search(tuner, stop, role)
        except SweepEnd as end:
            if not isinstance(end.cause, Stopped):
                raise end.cause from end
            code = end.cause.exit_code
        except KeyboardInterrupt:
            code = 130
        if role == chief_and_workers.WORKER:
            board.line("the chief has no more trials" if not code else "stopped")
            return code
        board.mark_stopped()
        best = report.finish(board, sweep, config, folder, data.name)
        if code == Stopped(CLOSED_PIPE).exit_code:
            with contextlib.suppress(BrokenPipeError):  # such as after `2>&1 | head`
                print(
                    f"stopped by SIGPIPE; the same command resumes in {folder.path}",
                    file=sys.stderr,
                )
        elif code:
            board.line(f"stopped; the same command, with --workdir={values.workdir}, resumes")
        elif best is None:
            raise UserError(_reason_without_best(board))
        return code
    except OSError as error:
        if error.filename is None:  # an error of the output
            raise
        raise UserError(f"cannot write the workdir {folder.path}: {error.strerror}") from error
    finally:
        folder.close()


def _wait_for_chief(seconds: float, output: Any, stop: StopRequest) -> None:
    """Waits for the chief before anything is written. A worker without a chief leaves no files."""
    from tfwd.tuning import chief_and_workers

    def check() -> None:
        if stop:
            raise KeyboardInterrupt

    try:
        with stop:
            chief_and_workers.wait_for_chief(seconds, output.print, check)
    except chief_and_workers.NoChief as error:
        raise UserError(f"{error} (--chief_timeout)") from error


def _add_resumed_trial(board: Any, trial: Any, folder: Any) -> None:
    """Adds a trial of a resumed sweep to the board."""
    try:
        board.add(trial)
    except Exception as error:  # the file may hold anything
        path = folder.trial_folder(trial.trial_id) / "trial.json"
        raise UserError(
            f"{path} is not a record of a trial ({type(error).__name__}: {error}); restore it "
            "from a copy, or give --overwrite to start again"
        ) from error


def _run_search(tuner: Any, stop: StopRequest, role: str) -> None:
    from tfwd.tuning import chief_and_workers

    # The chief trains nothing, and its state is always on the disk.
    if role == chief_and_workers.CHIEF:
        tuner.search()
        return
    with stop:
        if role == chief_and_workers.ALONE:
            tuner.search()
            return
        import grpc

        try:
            tuner.search()
        except grpc.RpcError as error:
            raise UserError(f"the chief does not answer: {error.details()}") from error


def _oracle(sweep: Sweep, config: Any, timeout: float | None = None) -> Any:
    import keras_tuner

    from tfwd.runs.sweeps.trial_rows import OBJECTIVE
    from tfwd.tuning.oracles import make_oracle
    from tfwd.tuning.search_space import hyperparameters

    try:
        return make_oracle(
            sweep.method,
            keras_tuner.Objective(OBJECTIVE, "min"),
            hyperparameters(sweep.space),
            max_trials=sweep.trials,
            max_epochs=config.training.epochs,
            factor=sweep.factor,
            iterations=sweep.iterations,
            seed=sweep.seed,
            worker_timeout=timeout,
        )
    except ValueError as error:
        raise UserError(f"the sweep: {error}") from error


def _with_flags(sweep: Sweep, values: flags.FlagValues) -> Sweep:
    """Returns the sweep with the values of the command line."""
    given = {
        "method": values.method or None,
        "max_trials": values.max_trials,
        "executions_per_trial": values.executions_per_trial,
        "seed": values.search_seed,
    }
    return dataclasses.replace(sweep, **{k: v for k, v in given.items() if v is not None})


def _print_header(board: Any, sweep: Sweep, config: Any, data: Any, folder: Any, notes: list[str],
           role: str, again: bool) -> None:  # fmt: skip
    from tfwd.runs.sweeps.report import plan
    from tfwd.tuning import chief_and_workers

    what = {
        chief_and_workers.CHIEF: "chief of the sweep",
        chief_and_workers.WORKER: "worker of the sweep",
    }
    board.line(f"{data.name}: {data.size} for training; {what.get(role, 'sweep')} in {folder.path}")
    if role != chief_and_workers.WORKER:
        oracle = _oracle(sweep, config)
        for line in [*plan(sweep, oracle, config.training.epochs), *notes]:
            board.line(line)
    if again:
        done = sum(row.status != "waiting" for row in board.rows.values())
        board.line(f"resuming the sweep: {done} trials are done")
        if sweep.max_trials is not None and sweep.max_trials < done:
            board.line(
                f"max_trials={sweep.max_trials} is lower: all trials stay, and no trial is added"
            )


def _reason_without_best(board: Any) -> str:
    reasons = [row.message for row in board.rows.values() if row.message]
    return f"no trial succeeded; the first trial: {reasons[0]}" if reasons else "no trial ran"


def _require(module: str, name: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UserError(f"tfwd-tune needs {name}: in a checkout of tfwd, pip install '.[tune]'")
