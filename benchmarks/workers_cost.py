"""Cost of several workers: the time of a step for 1, 2 and 4 processes, and the bytes they send.

    python benchmarks/workers_cost.py

The model and the step are from configs/quickstart.py. The processes share this machine's cores and
communicate over the loopback address, with one thread each. So the figures show the cost of the
gradient exchange. They do not show the gain of more machines. Each process also makes steps with
`optimizer.steps_per_update=4`, which sends the gradient once in four steps.

A formula gives the speed of up to a hundred machines, each with the batch of one process. Its
inputs are the time of a step in one process and the bytes of the gradient:

    efficiency = t / (t + c/k),   c = 2 (N-1)/N * G/W + 2 (N-1) * d

t is the time of a step without exchange, k the steps per update, G the bytes of the gradient, W the
bandwidth, and d the time of a message. The formula assumes a ring all-reduce, equal machines, and
an exchange that does not overlap with computation. Only t and G are measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import growth_plots, measure
from common.measure import CONSOLE, Row, Spread
from lm_step_time import load_config, quickstart_words

PROCESSES = (1, 2, 4)
STEPS_PER_UPDATE = (1, 4)
MACHINES = (1, 2, 4, 8, 16, 32, 64, 100)
BANDWIDTHS = {"10 Gbit/s": 10e9 / 8, "100 Gbit/s": 100e9 / 8}
DELAY = 50e-6  # assumed seconds of a message between two machines
LOOPBACK = Path("/proc/net/dev")


def sent_bytes() -> int | None:
    """Returns the bytes sent over the loopback address so far, or None if unknown."""
    with contextlib.suppress(OSError):
        for line in LOOPBACK.read_text("utf-8").splitlines():
            if line.strip().startswith("lo:"):
                return int(line.split(":")[1].split()[8])
    return None


def work() -> None:
    """Makes steps as one of the workers in `TF_CONFIG`. The chief prints the times as JSON."""
    import numpy as np
    import tensorflow as tf

    from tfwd import _keras
    from tfwd.lm.model import make_model
    from tfwd.lm.training_step import make_step
    from tfwd.runs.training.step_variables import StepVariables
    from tfwd.runs.workers import connection
    from tfwd.runs.workers.worker_addresses import find_cluster
    from tfwd.runs.workers.worker_group import Workers

    cluster = find_cluster("auto")
    workers = Workers(connection.connect(cluster, 300.0, 60.0)) if cluster else Workers()

    def make(config: Any, words: int, every: int) -> tuple[Callable[[], None], int]:
        """Returns a function that makes four steps, and the bytes of the gradient."""
        shape = config.data.batch_size, config.data.window
        ids = np.random.default_rng(0).integers(words, size=(2, *shape), dtype=np.int32)
        batch = [tf.constant(each) for each in ids]
        config.optimizer.learning_rate *= 1e-2
        config.optimizer.steps_per_update = every
        model = make_model(config, words)
        state = StepVariables(model.zero_state(shape[0]), config.optimizer.learning_rate)
        step = make_step(config, model, state, workers)

        def turn() -> None:
            for number in range(4):
                last = (number + 1) % every == 0
                step(*batch, **({} if last else {"update": False}))
            if not np.isfinite(state.take_log_loss()):
                raise FloatingPointError(f"the step failed: {step.failure()}")

        weights = [_keras.variables.tf_variable(v) for v in model.trainable_variables]
        return turn, sum(v.dtype.size * int(np.prod(v.shape)) for v in weights)

    turns = {}
    words = quickstart_words(load_config("quickstart"))
    for every in STEPS_PER_UPDATE:
        turns[every], gradient = make(load_config("quickstart"), words, every)
        for _ in range(3):
            turns[every]()
    found: dict[str, Any] = {"gradient": gradient, "seconds": {}, "sent": {}}
    rounds = 12
    for every, turn in turns.items():
        workers.wait()
        before, times = sent_bytes(), []
        for _ in range(rounds):
            begin = time.perf_counter()
            turn()
            times.append((time.perf_counter() - begin) / 4)
        after = sent_bytes()
        found["seconds"][every] = times
        if before is not None and after is not None:
            found["sent"][every] = (after - before) / workers.count / (4 * rounds)
        workers.wait()
    if workers.count == 1:
        turn, size = make(load_config("awd_lstm_ptb"), 10_000, 1)
        turn()
        begin = time.perf_counter()
        turn()
        found["published"] = {"seconds": (time.perf_counter() - begin) / 4, "gradient": size}
    if workers.is_chief:
        print(json.dumps(found), flush=True)


def measure_processes(count: int) -> dict[str, Any]:
    """Starts `count` processes, and returns the JSON object that their chief prints."""
    from tfwd.runs.workers.local_workers import free_ports
    from tfwd.runs.workers.worker_addresses import Cluster

    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(count))
    workers = []
    for index in range(count):
        environment = {
            **os.environ,
            "TF_CONFIG": Cluster(addresses, index).tf_config,
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        command = [sys.executable, __file__, "--worker"]
        errors = None if os.environ.get("SHOW_ERRORS") else subprocess.DEVNULL
        workers.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        )
    try:
        outputs = [worker.communicate(timeout=280)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    if any(worker.returncode for worker in workers):
        raise RuntimeError(
            f"a worker failed: to see its errors, run SHOW_ERRORS=1 {sys.executable} {__file__}"
        )
    return json.loads(outputs[0].splitlines()[-1])


def exchange_seconds(gradient: float, machines: int, bandwidth: float) -> float:
    """Returns the seconds of a gradient exchange, `c` in the formula of this module's docstring.

    Args:
        gradient: Bytes of the gradient.
        machines: Number of machines.
        bandwidth: Bytes per second.
    """
    ring = 2 * (machines - 1) / machines * gradient / bandwidth
    return ring + 2 * (machines - 1) * DELAY


def draw(models: dict[str, tuple[float, float]], folder: str) -> Path:
    """Draws the time of an exchange beside the time of a step, and returns the path of the plot.

    Args:
        models: dict from a name to the seconds of a step and the bytes of the gradient.
        folder: Folder of the plot.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, row = plt.subplots(
        1, len(models), figsize=(4.2 * len(models), 3.8), sharey=True, layout="constrained"
    )
    counts = MACHINES[1:]
    for axes, (model, (seconds, gradient)) in zip(row, models.items(), strict=True):
        for (name, bandwidth), colour in zip(
            BANDWIDTHS.items(), ("#c0392b", "#3b6ea5"), strict=True
        ):
            for every, style in zip(STEPS_PER_UPDATE, ("-", "--"), strict=True):
                values = [1e3 * exchange_seconds(gradient, n, bandwidth) / every for n in counts]
                label = f"exchange at {name}, updates every {every}"
                axes.plot(
                    counts, values, style, color=colour, marker="o", markersize=4, label=label
                )
        axes.axhline(1e3 * seconds, color="#888888", lw=2, label="computation (measured)")
        axes.set(xscale="log", yscale="log", xlabel="machines", title=model)
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(alpha=0.3)
    row[0].set_ylabel("ms per step")
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    path = Path(folder) / "workers.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def main() -> None:
    """Measures, draws, and reports a row for each number of processes."""
    options = measure.parser(__doc__)
    options.add_argument("--plots", default=str(growth_plots.FOLDER), help="folder for the plot")
    options.add_argument("--worker", action="store_true", help="run as one of the workers")
    chosen = options.parse_args()
    if chosen.worker:
        work()
        return
    found: dict[int, dict[str, Any]] = {}
    with measure.progress() as bar:
        task = bar.add_task("processes", total=len(PROCESSES))
        for count in PROCESSES:
            bar.update(task, description=f"{count} processes")
            found[count] = measure_processes(count)
            bar.advance(task)
    alone = found[1]["seconds"]["1"]
    gradient = found[1]["gradient"]
    rows = []
    for count in PROCESSES[1:]:
        for every in STEPS_PER_UPDATE:
            times = found[count]["seconds"][str(every)]
            rows.append(
                Row(
                    f"a step of {count} processes, updates every {every}",
                    Spread.of([t / statistics.median(alone) for t in times]),
                    "time over one process with one thread",
                    1e3 * statistics.median(times),
                    {"one process": 1e3 * statistics.median(alone)},
                )
            )
            sent = found[count]["sent"].get(str(every))
            if sent is not None:
                ring = 2 * (count - 1) / count * gradient / every
                rows.append(
                    Row(
                        f"bytes that each of {count} workers sends per step, updates every {every}",
                        Spread.of([sent / ring]),
                        "times 2 (N-1)/N gradients",
                        sent / 1e6,
                        {"formula": ring / 1e6},
                        "MB",
                    )
                )
    published = found[1]["published"]
    models = {
        f"quickstart ({gradient / 4e6:.1f} M weights)": (statistics.median(alone), gradient),
        f"published size ({published['gradient'] / 4e6:.1f} M weights)": (
            published["seconds"],
            published["gradient"],
        ),
    }
    for model, (seconds, size) in models.items():
        for name, bandwidth in BANDWIDTHS.items():
            for every in STEPS_PER_UPDATE:
                share = seconds / (seconds + exchange_seconds(size, 100, bandwidth) / every)
                rows.append(
                    Row(
                        f"efficiency of 100 machines by the formula, {model}, {name}, updates "
                        f"every {every}",
                        Spread.of([share]),
                        "share of the time that machines compute",
                    )
                )
    CONSOLE.print(f"plot: {draw(models, chosen.plots)}")
    measure.report("workers_cost", rows, processor=measure_processor(), measured=found)


def measure_processor() -> str:
    """Returns the name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown"


if __name__ == "__main__":
    main()
