"""Cost of several workers: the time of a step for 1, 2 and 4 processes, and the bytes they send.

    python benchmarks/workers.py

The model and the step of configs/quickstart.py. The processes share this machine's cores and talk
over the loopback address, with one thread each. So the figures show what the exchange of gradients
costs, and not what more machines bring. Each process also makes steps with an update in every
fourth step (`optimizer.steps_per_update=4`), which sends the gradient once in four steps.

From the time of a step in one process and the bytes of the gradient, a formula gives the speed of
up to a hundred machines, each with the batch of that process:

    efficiency = t / (t + c/k),   c = 2 (N-1)/N * G/W + 2 (N-1) * d

t is the time of a step without exchange, k the steps per update, G the bytes of the gradient, W the
bandwidth, and d the time of a message. The formula assumes a ring all-reduce, equal machines, and
an exchange that does not overlap with computation. Only t and G are measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import measure, plots
from common.measure import CONSOLE, Row, Spread
from lm_step import load_config, quickstart_words

PROCESSES = (1, 2, 4)
STEPS_PER_UPDATE = (1, 4)
MACHINES = (1, 2, 4, 8, 16, 32, 64, 100)
BANDWIDTHS = {"10 Gbit/s": 10e9 / 8, "100 Gbit/s": 100e9 / 8}
DELAY = 50e-6  # seconds of a message between two machines: an assumption
LOOPBACK = Path("/proc/net/dev")


def sent_bytes() -> int | None:
    """Returns the bytes sent over the loopback address so far, or None if unknown."""
    with contextlib.suppress(OSError):
        for line in LOOPBACK.read_text("utf-8").splitlines():
            if line.strip().startswith("lo:"):
                return int(line.split(":")[1].split()[8])
    return None


def work() -> None:
    """Makes steps as one of the workers of `TF_CONFIG`, and prints the times as JSON."""
    import numpy as np
    import tensorflow as tf

    from tfwd import _keras
    from tfwd.lm.model import make_model
    from tfwd.lm.step import make_step
    from tfwd.runs.storage.state import RunState
    from tfwd.runs.workers import connection
    from tfwd.runs.workers.cluster import find_cluster
    from tfwd.runs.workers.workers import Workers

    cluster = find_cluster("auto")
    workers = Workers(connection.connect(cluster, 300.0, 60.0)) if cluster else Workers()
    config = load_config("quickstart")
    words = quickstart_words(config)
    shape = config.data.batch_size, config.data.window
    ids = np.random.default_rng(0).integers(words, size=(2, *shape), dtype=np.int32)
    batch = [tf.constant(each) for each in ids]
    config.optimizer.learning_rate *= 1e-2
    turns: dict[int, Any] = {}
    for every in STEPS_PER_UPDATE:
        config.optimizer.steps_per_update = every
        model = make_model(config, words)
        state = RunState(model.zero_state(shape[0]), config.optimizer.learning_rate)
        step = make_step(config, model, state, workers)

        def turn(step: Any = step, state: RunState = state, every: int = every) -> None:
            for number in range(4):
                last = (number + 1) % every == 0
                step(*batch, **({} if last else {"update": False}))
            if not np.isfinite(state.take_log()):
                raise FloatingPointError(f"the step failed: {step.failure()}")

        turns[every] = turn
        for _ in range(3):
            turn()
    gradient = sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables)
    assert all(
        _keras.variables.tf_variable(v).dtype == tf.float32 for v in model.trainable_variables
    )
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
    if workers.is_chief:
        print(json.dumps(found), flush=True)


def measure_processes(count: int) -> dict[str, Any]:
    """Returns what the chief of `count` processes prints."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    workers = []
    for index in range(count):
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": addresses}, "task": task} if count > 1 else {}
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps(config),
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
        raise RuntimeError(f"a worker failed; run {sys.executable} {__file__} with SHOW_ERRORS=1")
    return json.loads(outputs[0].splitlines()[-1])


def efficiency(
    seconds: float, gradient: float, machines: int, bandwidth: float, every: int
) -> float:
    """Returns the share of its time that a machine computes, by the formula above.

    Args:
        seconds: time of a step without exchange.
        gradient: bytes of the gradient.
        machines: number of machines.
        bandwidth: bytes per second.
        every: steps per update.
    """
    ring = 2 * (machines - 1) / machines * gradient / bandwidth
    exchange = ring + 2 * (machines - 1) * DELAY
    return seconds / (seconds + exchange / every) if machines > 1 else 1.0


def draw(seconds: float, gradient: float, folder: str) -> Path:
    """Draws the efficiency on paper, and returns the path of the plot."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.4, 3.6), layout="constrained")
    for (name, bandwidth), colour in zip(BANDWIDTHS.items(), ("#c0392b", "#3b6ea5"), strict=True):
        for every, style in zip(STEPS_PER_UPDATE, ("-", "--"), strict=True):
            values = [efficiency(seconds, gradient, n, bandwidth, every) for n in MACHINES]
            label = f"{name}, update every {every} step{'s' * (every > 1)}"
            axes.plot(MACHINES, values, style, color=colour, marker="o", markersize=4, label=label)
    axes.set(xscale="log", ylim=(0, 1.03), xlabel="machines", ylabel="efficiency")
    axes.set_title("Formula: share of the time that machines compute", fontsize=10)
    axes.set_xticks(MACHINES, [str(n) for n in MACHINES])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")
    path = Path(folder) / "workers.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def main() -> None:
    """Measures, draws, and reports a row for each number of processes."""
    options = measure.parser(__doc__)
    options.add_argument("--plots", default=str(plots.FOLDER), help="folder for the plot")
    options.add_argument("--worker", action="store_true", help="be one of the workers")
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
    seconds = statistics.median(alone)
    for name, bandwidth in BANDWIDTHS.items():
        for every in STEPS_PER_UPDATE:
            rows.append(
                Row(
                    f"100 machines at {name}, updates every {every}, by the formula",
                    Spread.of([efficiency(seconds, gradient, 100, bandwidth, every)]),
                    "share of the time that machines compute",
                )
            )
    CONSOLE.print(f"plot: {draw(seconds, gradient, chosen.plots)}")
    measure.report("workers", rows, processor=measure_processor(), measured=found)


def measure_processor() -> str:
    """Returns the name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown"


if __name__ == "__main__":
    main()
