"""Whether a sweep's memory grows from trial to trial.

    python benchmarks/sweep_memory.py

Thirty trials of tfwd-tune in one process, each a new model of some megabytes of weights, moments
and functions. The memory that the process holds (resident set) is read after each trial. The first
trials fill pools that stay, and now and then the allocator takes a block more; growth is therefore
the median of the slopes between any two of the last twenty (Theil and Sen), with the quartiles. A
model that is left behind would add at least its weights and moments, whose size is printed beside
it. At the end: one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from tfwd.lm import tune
from tfwd.lm.command_line import parse
from tfwd.lm.sweeps import tuner

ROOT = Path(__file__).resolve().parent.parent
LAST = 20  # trials that the growth is over
SWEEP = """
from tfwd.lm.sweeps import Float, Sweep

def get_sweep():
    return Sweep({"model.weight_dropout": Float(0, 0.7)})
"""


def resident() -> float:
    """The process's resident memory now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Runs the sweep and prints the memory."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trials", type=int, default=30)
    trials = arguments.parse_args().trials
    readings: list[float] = []
    tidy_up = tuner.tidy_up

    def tidy_up_and_read() -> None:
        tidy_up()
        readings.append(resident())
        print(f"after trial {len(readings) - 1}: {readings[-1]:,.1f} MiB", flush=True)

    tuner.tidy_up = tidy_up_and_read
    with tempfile.TemporaryDirectory() as folder:
        words = np.random.default_rng(0).integers(0, 300, (60, 8))
        text = "\n".join(" ".join(f"w{word}" for word in line) for line in words)
        Path(folder, "text.txt").write_text(text + "\n")
        Path(folder, "sweep.py").write_text(SWEEP)
        settings = {
            "data.path": f"{folder}/text.txt",
            "data.min_count": 1,
            "data.batch_size": 4,
            "data.eval_batch_size": 1,
            "data.window": 20,
            "model.hidden_units": "512",
            "model.tie_weights": "false",
            "training.epochs": 1,
        }
        flags = [f"--config.{key}={value}" for key, value in settings.items()]
        flags += [f"--config={ROOT}/configs/quickstart.py", f"--sweep={folder}/sweep.py"]
        flags += [f"--workdir={folder}/sweep", f"--max_trials={trials}"]
        tune.main(parse(["tfwd-tune", *flags], tune.define, config=True))
        files = Path(folder).glob("sweep/*/run-0/best/*/tensors*")
        saved = sum(path.stat().st_size for path in files)
    last = np.array(readings[-LAST:])
    pairs = itertools.combinations(enumerate(last), 2)
    slopes = [(after - before) / (j - i) for (i, before), (j, after) in pairs]
    low, slope, high = (float(value) for value in np.percentile(slopes, (25, 50, 75)))
    print(
        f"growth: {slope:.3f} MiB a trial ({low:.3f} to {high:.3f}) over the last {len(last)} of "
        f"{trials}"
    )
    one = 3 * saved / trials / 2**20  # weights, and Adam's two moments of each
    print(f"the weights and moments of one trial: {one:.1f} MiB")
    result = {
        "benchmark": "sweep_memory",
        "trials": trials,
        "mib_after_trial": [round(value, 1) for value in readings],
        "growth_mib_a_trial": round(slope, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "mib_of_a_trials_weights_and_moments": round(one, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
