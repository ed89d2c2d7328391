"""Measurements of models with many weights, each side in a separate process."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import measure
from common.measure import Row, Spread, ratio

RATE = 0.3
SIDES = {
    "dense16": ("plain", "naive", "tfwd", "PyTorch"),
    "dense768": ("plain", "naive", "tfwd", "PyTorch"),
    "MobileNetV2": ("plain", "tfwd"),
    "BERT": ("plain", "naive", "tfwd"),
    "LSTMs": ("plain", "naive", "tfwd"),
}
TITLES = {
    "dense16": "100 Dense layers of 16",
    "dense768": "20 Dense layers of 768",
    "MobileNetV2": "MobileNetV2, images of 64x64, batch 8",
    "BERT": "BERT of 12 layers of 64, 8 texts of 64",
    "LSTMs": "8 LSTMs of 64, 8 sequences of 10",
}
# Goals. For each model and figure: the other side, and the largest ratio to its cost.
GOALS = {
    ("dense16", "first step"): ("naive", 1.5),
    ("dense16", "step"): ("naive", 1.0),
    ("dense16", "eager forward"): ("naive", 1.0),
    ("dense16", "eager forward and backward"): ("naive", 1.0),
    ("dense768", "step"): ("naive", 0.75),
    ("dense768", "eager forward"): ("naive", 1.0),
    ("dense768", "eager forward and backward"): ("naive", 1.0),
    ("MobileNetV2", "first step"): ("plain", 1.5),
    ("BERT", "first step"): ("plain", 1.5),
}
FIGURES = ("first step", "step", "eager forward", "eager forward and backward")
# Another round begins if it would end within this time. A round takes about 100 seconds.
SECONDS = 115.0


def make(name: str, side: str) -> tuple[Any, Any, Any]:
    """Returns a model with its inputs and targets."""
    import numpy as np

    from common.many_layers_models import MODELS

    model, x, y = MODELS[name](side)
    return model, np.asarray(x), np.asarray(y)


def child(name: str, side: str) -> dict[str, Any]:
    """Measures one side of one model in this process: seconds, and numbers of operations."""
    if side == "PyTorch":
        from peers import torch_many_layers

        return {"step": timed(torch_many_layers.step(name, RATE), 30)}
    measure.equal_threads()
    import tensorflow as tf

    model, x, y = make(name, side)
    model.compile("sgd", "mse")

    def step() -> Any:
        return model.train_on_batch(x, y)

    found: dict[str, Any] = {"first step": timed(step, 1, warmup=0), "step": timed(step, 20)}
    given = tf.constant(x)

    def forward() -> Any:
        return model(given, training=True)

    def both() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(given, training=True))
        return tape.gradient(loss, model.trainable_variables)

    found["eager forward"] = timed(forward, 5)
    found["eager forward and backward"] = timed(both, 5)
    in_forward, in_both = operations(forward), operations(both)
    found["operations"] = [in_forward[0], in_both[0] - in_forward[0], in_both[1]]
    return found


def timed(function: Callable[[], Any], times: int, warmup: int = 2) -> float:
    """Returns the median of the seconds per call."""
    taken = []
    for turn in range(warmup + times):
        start = time.perf_counter()
        function()
        if turn >= warmup:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def operations(function: Callable[[], Any]) -> tuple[int, int]:
    """Counts the operations that a function adds to a graph, including called functions.

    Returns:
        The number of operations that TensorFlow runs one by one, and the number of operations in
        functions that XLA compiles.
    """
    import tensorflow as tf

    graph = tf.function(function, autograph=False).get_concrete_function().graph
    graph = graph.as_graph_def()
    library = {f.signature.name: f for f in graph.library.function}

    def count(nodes: Any) -> tuple[int, int]:
        single = compiled = 0
        for node in nodes:
            called = library.get(node.attr["f"].func.name if "f" in node.attr else "")
            if called is None:
                single += 1
                continue
            inside = count(called.node_def)
            if called.attr["_XlaMustCompile"].b:
                single, compiled = single + 1, compiled + sum(inside)
            else:
                single, compiled = single + inside[0], compiled + inside[1]
        return single, compiled

    return count(graph.node)


def in_a_process(script: str, *arguments: str) -> dict[str, Any]:
    """Runs a script in a new process, and returns the JSON object that it prints last."""
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def rows(name: str, found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Returns the rows of a model: ratios to the side that the goal names, or to plain."""
    made = []
    for figure in FIGURES:
        times = {
            side: [run[figure] for run in runs if figure in run] for side, runs in found.items()
        }
        times = {side: each for side, each in times.items() if each}
        other, most = GOALS.get((name, figure), ("plain", None))
        if other not in times:
            continue
        median = measure.milliseconds(times)
        ours = float(median.pop("tfwd"))
        claim = f"{TITLES[name]}: {figure}"
        spread = ratio(times["tfwd"], times[other])
        made.append(Row(claim, spread, f"time over {other}", ours, median, at_most=most))
    counts = {side: runs[0]["operations"] for side, runs in found.items() if side != "PyTorch"}
    for index, part in enumerate(("forward", "backward")):
        more = {side: float(count[index]) for side, count in counts.items()}
        weights = {"dense16": 100, "dense768": 20}.get(name)
        each = (more["tfwd"] - more["plain"]) / (weights or 1)
        claim = f"{TITLES[name]}: operations, {part}"
        means = "beyond plain, per layer" if weights else "beyond plain, all"
        most = 60.0 if weights else None
        ours = more.pop("tfwd")
        made.append(Row(claim, Spread.of([each]), means, ours, dict(more), "", at_most=most))
    return made


def measured(script: str, names: Sequence[str], doc: str | None) -> None:
    """Measures models in rounds until the time is over, and reports.

    Args:
        script: Path of the script. Its child processes run the same script with `--child`.
        names: Names of the models.
        doc: Docstring of the script.
    """
    parser = measure.parser(doc)
    parser.add_argument("--child", nargs=2, help="measure this model and side in this process")
    flags = parser.parse_args()
    if flags.child:
        print(json.dumps(child(*flags.child)), flush=True)
        return
    sides = {name: list(SIDES[name]) for name in names}
    if importlib.util.find_spec("torch") is None:
        sides = {name: [s for s in each if s != "PyTorch"] for name, each in sides.items()}
    found: dict[str, dict[str, list]] = {n: {s: [] for s in each} for n, each in sides.items()}
    start, turn = time.perf_counter(), 0
    while turn == 0 or (time.perf_counter() - start) * (turn + 1) / turn < SECONDS:
        for name, each in sides.items():
            for side in each if turn % 2 == 0 else reversed(each):
                found[name][side].append(in_a_process(script, "--child", name, side))
        turn += 1
    made = [row for name in names for row in rows(name, found[name])]
    measure.report(Path(script).stem, made)
