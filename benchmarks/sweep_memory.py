"""Growth of a sweep's memory from trial to trial.

    python benchmarks/sweep_memory.py

Thirty trials of tfwd-tune run in one process. Each trial has a new model with some megabytes of
weights, moments and functions. The resident set of the process is read after each trial. The first
trials fill pools that stay allocated, and sometimes the allocator takes one more block. So growth
is the median of the slopes between each two of the last twenty trials (Theil and Sen), with the
quartiles. A leaked model would add at least its weights and moments. The figure is the growth per
trial, as a share of the bytes of weights and moments.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

from common import measure
from common.measure import Row, Spread

ROOT = Path(__file__).resolve().parent.parent
LAST = 20  # the growth is computed from this number of last trials
MIB = 1 << 20
SWEEP = """
from tfwd.lm.sweeps import Float, Sweep

def get_sweep():
    return Sweep({"model.weight_dropout": Float(0, 0.7)})
"""
SETTINGS = {
    "data.min_count": 1,
    "data.batch_size": 4,
    "data.eval_batch_size": 1,
    "data.window": 20,
    "model.hidden_units": "512",
    "model.tie_weights": "false",
    "training.epochs": 1,
    "training.tensorboard": "false",
}


def resident() -> float:
    """Returns the process's resident memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def run(tuner: Any, trials: int) -> tuple[list[float], float]:
    """Returns the memory after each trial, and the size of a trial's weights and moments (MiB)."""
    import numpy as np

    from tfwd.lm.commands import tune
    from tfwd.lm.program import PROGRAM
    from tfwd.runs.settings.command_line import parse

    readings: list[float] = []
    tidy_up = tuner.free_memory

    def tidy_up_and_read() -> None:
        tidy_up()
        readings.append(resident())
        measure.CONSOLE.print(f"after trial {len(readings) - 1}: {readings[-1]:,.1f} MiB")

    tuner.free_memory = tidy_up_and_read
    with tempfile.TemporaryDirectory() as folder:
        words = np.random.default_rng(0).integers(0, 300, (60, 8))
        text = "\n".join(" ".join(f"w{word}" for word in line) for line in words)
        Path(folder, "text.txt").write_text(text + "\n")
        Path(folder, "sweep.py").write_text(SWEEP)
        flags = [f"--config.{key}={value}" for key, value in SETTINGS.items()]
        flags += [f"--config={ROOT}/configs/quickstart.py", f"--sweep={folder}/sweep.py"]
        flags += [f"--config.data.path={folder}/text.txt"]
        flags += [f"--workdir={folder}/sweep", f"--max_trials={trials}"]
        tune.main(parse(["tfwd-tune", *flags], tune.define, schema=PROGRAM.schema))
        files = Path(folder).glob("sweep/*/run-0/best/*/tensors*")
        saved = sum(path.stat().st_size for path in files)
    # The files have the weights. Adam has two moments of each weight in addition.
    return readings, 3 * saved / trials / MIB


def slopes(readings: list[float]) -> list[float]:
    """Returns the growth per trial between each two of the readings."""
    pairs = itertools.combinations(enumerate(readings), 2)
    return [(after - before) / (j - i) for (i, before), (j, after) in pairs]


def main() -> None:
    """Runs the sweep, and reports a row."""
    options = measure.parser(__doc__)
    options.add_argument("--trials", type=int, default=30, help="number of trials, at least 3")
    trials = options.parse_args().trials
    if trials < 3:
        options.error(f"--trials={trials}: expected at least 3 trials to compute the growth")
    tuner = measure.module("tfwd.runs.sweeps.tuner", "keras-tuner")
    rows, data = [], {}
    if tuner is not None:
        readings, one = run(tuner, trials)
        last = readings[-LAST:]
        growth = Spread.of(slopes(last))
        share = Spread(*(value / one for value in growth))
        claim = f"growth of a sweep's memory per trial, over the last {len(last)} of {trials}"
        peers: dict[str, float | str] = {"a model left behind": one}
        means = "share of a trial's weights and moments"
        rows.append(Row(claim, share, means, growth.median, peers, "MiB", no_more=0.0))
        data = {"mib_after_trial": readings}
    measure.report("sweep_memory", rows, **data)


if __name__ == "__main__":
    main()
