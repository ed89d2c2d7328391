"""Writes the report of a sweep: the tables, the plot and the best configuration."""

from __future__ import annotations

import json

import ml_collections
from rich import box
from rich.table import Table

from tfwd.runs.errors import as_user_error
from tfwd.runs.settings.config import flat_keys, get
from tfwd.runs.settings.validators import shown
from tfwd.runs.storage.file_access import write_file
from tfwd.runs.sweeps import score_plot
from tfwd.runs.sweeps.live_table import Board
from tfwd.runs.sweeps.sweep import Sweep, apply, points
from tfwd.runs.sweeps.sweep_folder import SweepFolder
from tfwd.runs.sweeps.trial_rows import Row, ranked, reasons, write_csv
from tfwd.tuning.oracles import HyperbandOracle
from tfwd.tuning.search_space import grid_size, size


def finish(board: Board, sweep: Sweep, config: ml_collections.ConfigDict, folder: SweepFolder,
           text_name: str) -> Row | None:  # fmt: skip
    """Prints the final table and writes `trials.csv`, `plots/trials.png` and `best_config.py`.

    Returns:
        The best trial; None if no trial is done.

    Raises:
        UserError: a file cannot be written.
    """
    rows = sorted(board.rows.values(), key=lambda row: int(row.trial))
    write_csv(rows, sweep.space, folder)
    best = ranked(rows)[:1]
    board.console.print(board.table())
    for line in reasons(rows):
        board.console.print(line, markup=False, highlight=False)
    if not best:
        return None
    title = f"{text_name}, {len(rows)} trial{'s' * (len(rows) > 1)} ({sweep.method})"
    with as_user_error(f"cannot write {folder.plots}", OSError):
        score_plot.draw(rows, sweep.space, folder.program.score, folder.plot, title)
    write_best(best[0], sweep, config, folder)
    values = ", ".join(f"{key}={shown(value)}" for key, value in best[0].values.items())
    board.line(f"best: trial {best[0].trial} with {values}")
    board.line(f"table: {folder.table}   plot: {folder.plot}")
    board.line(
        f"the best configuration: {folder.program.command} --config={folder.best_config} "
        "--workdir=FOLDER"
    )
    return best[0]


def write_best(
    best: Row, sweep: Sweep, config: ml_collections.ConfigDict, folder: SweepFolder
) -> None:
    """Writes `best_config.py` for `tfwd-train --config`, with the values that are not defaults.

    Raises:
        UserError: the file cannot be written.
    """
    program = folder.program
    chosen, default = apply(config, best.values, program.schema), program.schema.default()
    assert best.loss is not None
    runs = f", the mean of {len(best.losses)} seeds" if len(best.losses) > 1 else ""
    lines = [
        f'"""The best trial of a sweep: {best.trial}, validation '
        f"{program.score.name} {program.score.of_loss(best.loss):.2f}{runs}.",
        "",
        f"    {program.command} --config={folder.best_config.name} --workdir=FOLDER",
        '"""',
        "",
        f"from {program.config_module} import default_config",
        "",
        "",
        "def get_config():",
        "    config = default_config()",
    ]
    for key in flat_keys(chosen):
        value, before = get(chosen, key), get(default, key)
        if key in sweep.space or value != before:
            note = "  # from the sweep" if key in sweep.space else ""
            text = json.dumps(value) if isinstance(value, str) else repr(value)
            lines.append(f"    config.{key} = {text}{note}")
    write_file(folder.best_config, "\n".join([*lines, "    return config", ""]))


def space_table(sweep: Sweep, config: ml_collections.ConfigDict) -> Table:
    """Returns the table of the searched values, for `--dry_run`."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("key", overflow="fold")
    made.add_column("values", overflow="fold")
    made.add_column("in the config", justify="right", overflow="fold")
    made.add_column("number", justify="right")
    for key, spec in sweep.space.items():
        count = len(spec.values) if spec.values is not None else None
        now = get(config, key)
        made.add_row(key, str(spec), "" if now is None else shown(now), f"{count or 'any'}")
    return made


def plan(sweep: Sweep, oracle: object, epochs: int) -> list[str]:
    """Returns the planned trials and their epochs, as lines of text."""
    lines = [f"space: {points(sweep)}; method: {sweep.method}"]
    if isinstance(oracle, HyperbandOracle):
        for number, rounds in enumerate(oracle.rounds(), 1):
            parts = [f"{trials} of {most} epochs" for trials, most in rounds]
            lines.append(f"bracket {number}: {', the best '.join(parts)}")
    count = trial_count(sweep, oracle)
    runs = sweep.executions_per_trial
    each = f" of {runs} runs each" if runs > 1 else ""
    promoted = " (a promotion counts as a trial)" if sweep.method == "hyperband" else ""
    epochs_in_all = runs * total_epochs(sweep, oracle, epochs)
    lines.append(f"trials: {count:,}{each}{promoted}, total epochs: {epochs_in_all:,}")
    return lines


def trial_count(sweep: Sweep, oracle: object) -> int:
    """Returns the maximum number of trials of a sweep."""
    if isinstance(oracle, HyperbandOracle):
        return sweep.iterations * sum(n for rounds in oracle.rounds() for n, _ in rounds)
    point_count = grid_size(sweep.space) if sweep.method == "grid" else size(sweep.space)
    if sweep.method == "bayesian":
        point_count = None  # this method may try a point again
    return min(count for count in (point_count, sweep.trials) if count is not None)


def total_epochs(sweep: Sweep, oracle: object, epochs: int) -> int:
    """Returns the total number of epochs. The epochs of a promoted trial count once."""
    if not isinstance(oracle, HyperbandOracle):
        return trial_count(sweep, oracle) * epochs
    total = 0
    for rounds in oracle.rounds():
        before = 0
        for trials, most in rounds:
            total, before = total + trials * (most - before), most
    return total * sweep.iterations
