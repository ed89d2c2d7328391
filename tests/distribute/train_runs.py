"""Starts `tfwd-train` in several processes, and reads what they have written."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from watched_processes import Processes, clusters, finish

PROGRAM = Path(__file__).with_name("train_program.py")
RUN_FILE = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], None, '__main__')"

FLAGS = {
    "data.level": "word",
    "data.batch_size": 6,
    "data.eval_batch_size": 4,
    "data.window": 7,
    "data.min_count": 1,
    "model.embedding_dim": 8,
    "model.hidden_units": "(6,8)",
    "model.weight_dropout": 0.3,
    "model.embedding_dropout": 0.2,
    "model.input_dropout": 0.2,
    "model.hidden_dropout": 0.2,
    "model.output_dropout": 0.2,
    "optimizer.learning_rate": 0.05,  # larger rates amplify the last digits
    "optimizer.clip_norm": 0.5,
    "optimizer.weight_decay": 1e-4,
    "optimizer.l2": 1e-4,
    "optimizer.non_monotone_interval": 1,
    "training.epochs": 3,
    "training.lr_decay_factor": 0.5,
    "training.checkpoint_steps": 5,
    "training.checkpoint_seconds": 0,
    "training.log_steps": 4,
    "training.deterministic": True,
    "training.tensorboard": False,
    "gradients.every": 10,
    "sample.tokens": 5,
}


def write_corpus(folder: Path) -> Path:
    """Writes three small texts of random words."""
    generator = np.random.default_rng(0)
    for name, lines in (("train", 90), ("valid", 20), ("test", 20)):
        words = [[f"w{number}" for number in generator.integers(0, 30, 6)] for _ in range(lines)]
        text = "\n".join(" ".join(line) for line in words) + "\n"
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


def arguments(corpus: Path, workdir: Path, **changed: Any) -> list[str]:
    flags = {**FLAGS, "data.path": corpus, **changed}
    config = [f"--config.{key}={value}" for key, value in flags.items()]
    return ["--config=quickstart", f"--workdir={workdir}", "--heartbeat_timeout=10", *config]


def start(
    processes: Processes,
    given: Sequence[Sequence[str]],
    records: Path,
    variables: Mapping[int, Mapping[str, str]] | None = None,
) -> list[subprocess.Popen[str]]:
    """Starts a worker for each list of arguments.

    Args:
        processes: the starter.
        given: the arguments of each worker. A single list is one process without workers.
        records: folder for what each worker records.
        variables: further variables of the environment, by the worker's number.
    """
    records.mkdir(exist_ok=True)
    started = []
    for index, cluster in enumerate(clusters(len(given))):
        environment = {"TF_CONFIG": json.dumps(cluster)} if len(given) > 1 else {}
        environment.update((variables or {}).get(index, {}))
        command = [str(PROGRAM), str(records / f"{index}.json"), *given[index]]
        started.append(processes.python(RUN_FILE, command, environment))
    return started


def run(
    given: Sequence[Sequence[str]],
    records: Path,
    variables: Mapping[int, Mapping[str, str]] | None = None,
) -> list[tuple[int, str]]:
    """Runs a worker for each list of arguments. Returns the exit code and the output of each."""
    with Processes() as processes:
        return [finish(worker) for worker in start(processes, given, records, variables)]


# Tolerance of numbers after a training in float32. Each step amplifies the differences between
# orders of sums. They reached 1.2e-5 on a processor with AVX2. A defect changes the first digits.
AFTER_TRAINING = 1e-4


def run_well(given: Sequence[str], records: Path, count: int) -> list[str]:
    """Runs `count` workers, and returns their outputs."""
    ends = run([given] * count, records)
    assert [code for code, _ in ends] == [0] * count, "\n".join(output for _, output in ends)
    return [output for _, output in ends]


def log(workdir: Path) -> list[dict[str, Any]]:
    lines = (workdir / "metrics.jsonl").read_text("utf-8").splitlines()
    # Ratios of small differences have fewer digits than their parts, which are compared.
    omitted = "tokens_per_second", "signal", "noise_scale"
    records = [json.loads(line) for line in lines]
    return [{k: v for k, v in each.items() if not k.startswith(omitted)} for each in records]


def record(folder: Path, index: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"{index}.json").read_text("utf-8"))


def best_weights(workdir: Path) -> dict[str, np.ndarray]:
    (path,) = sorted((workdir / "best").glob("step-*"))[-1:]
    with np.load(path / "weights.npz") as file:
        return {name: file[name] for name in file.files if file[name].dtype.kind == "f"}


def assert_same(one: Any, other: Any, tolerance: float, what: str = "") -> None:
    """Asserts that two structures have equal numbers up to the order of sums."""
    if isinstance(one, dict):
        assert sorted(one) == sorted(other), what
        for key in one:
            assert_same(one[key], other[key], tolerance, f"{what}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), what
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, tolerance, f"{what}/{number}")
    elif isinstance(one, str) or one is None:
        assert one == other, what
    else:
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg=what)
