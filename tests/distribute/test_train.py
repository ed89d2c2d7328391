"""`tfwd-train` in one, two and three processes: the same training, and what ends it.

The oracle is the program in one process. The processes are real. They talk over the loopback
address.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from distribute.train_runs import (
    AFTER_TRAINING,
    arguments,
    assert_same,
    best_weights,
    log,
    record,
    run,
    run_well,
    start,
    write_corpus,
)
from stack_marks import rest
from watched_processes import Processes, finish

pytestmark = rest

STEPS = 36  # about as many steps as three epochs have


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the program in one and two processes, in the folders named 1 and 2."""
    folder = tmp_path_factory.mktemp("runs")
    run_in(corpus, folder, 1)
    run_in(corpus, folder, 2)
    return folder


@pytest.fixture(scope="module", params=[2, 3])
def count(request: pytest.FixtureRequest, corpus: Path, runs: Path) -> int:
    """Returns a number of processes in which the program has run."""
    if request.param == 3:
        run_in(corpus, runs, 3)
    return request.param


def run_in(corpus: Path, folder: Path, count: int) -> None:
    """Runs the program in several processes, in the folder named after their number."""
    outputs = run_well(arguments(corpus, folder / str(count)), folder / f"r{count}", count)
    (folder / f"r{count}" / "outputs.json").write_text(json.dumps(outputs), encoding="utf-8")


def test_workers_train_as_one_process(runs: Path, count: int) -> None:
    """Compares losses, norms, rates, gradient moments, best weights and scores."""
    assert_same(log(runs / "1"), log(runs / str(count)), AFTER_TRAINING)
    assert_same(best_weights(runs / "1"), best_weights(runs / str(count)), AFTER_TRAINING)
    one, other = (
        json.loads((runs / name / "report" / "summary.json").read_text("utf-8"))
        for name in ("1", str(count))
    )
    assert_same(one["texts"], other["texts"], AFTER_TRAINING)


def test_the_oracle_trains(runs: Path) -> None:
    kinds = Counter(line["kind"] for line in log(runs / "1"))
    assert kinds["valid"] == 3 and kinds["gradient"] >= 3
    losses = [line["loss"] for line in log(runs / "1") if line["kind"] == "train"]
    assert losses[-1] < losses[0]
    assert STEPS / 2 < len(record(runs / "r1")["steps"]) < STEPS * 2


def test_the_workers_have_the_same_bits(runs: Path, count: int) -> None:
    hashes = {record(runs / f"r{count}", index)["weights"] for index in range(count)}
    assert len(hashes) == 1


def test_every_token_is_read_by_one_worker(runs: Path, count: int) -> None:
    alone = record(runs / "r1")["steps"]
    parts = [record(runs / f"r{count}", index)["steps"] for index in range(count)]
    assert all(len(part) == len(alone) for part in parts)
    for number, whole in enumerate(alone):
        assert [token for part in parts for token in part[number]] == whole


def test_only_the_chief_shows_the_run(runs: Path, count: int) -> None:
    outputs = json.loads((runs / f"r{count}" / "outputs.json").read_text("utf-8"))
    assert "valid" in outputs[0] and f"{count} workers" in outputs[0]
    for output in outputs[1:]:  # TensorFlow's own lines may be there
        assert "epoch" not in output and "perplexity" not in output


def test_a_run_resumes_with_another_number_of_workers(
    runs: Path, corpus: Path, tmp_path: Path
) -> None:
    """Trains an epoch with two workers, the next with three, and the last in one process."""
    for count, epochs in ((2, 1), (3, 2), (1, 3)):
        given = arguments(corpus, tmp_path / "run", **{"training.epochs": epochs})
        run_well(given, tmp_path / f"r{count}", count)
    assert_same(log(runs / "1"), log(tmp_path / "run"), AFTER_TRAINING)
    assert_same(best_weights(runs / "1"), best_weights(tmp_path / "run"), AFTER_TRAINING)


def test_float64_differs_in_the_last_digits_only(corpus: Path, tmp_path: Path) -> None:
    given = {
        "model.dtype_policy": "float64",
        "gradients.every": 0,
        "optimizer.steps_per_update": 3,
    }
    for count in (1, 2):
        run_well(arguments(corpus, tmp_path / str(count), **given), tmp_path / f"r{count}", count)
    assert_same(best_weights(tmp_path / "1"), best_weights(tmp_path / "2"), 1e-12)


# Places in train_program.py, for the chief and another worker.
PLACES = {
    0: ["step 17", "evaluation 2", "save 3", "write 3", "sync 10"],
    1: ["step 17", "evaluation 2", "save 3"],
}
QUICK = [
    (signal.SIGKILL, 0, "step 17"),
    (signal.SIGTERM, 1, "step 17"),  # saves in the middle of an epoch
    (signal.SIGTERM, 1, "evaluation 2"),
]
FAULTS = [
    pytest.param(
        number,
        worker,
        place,
        id=f"{number.name}-{worker}-{place.replace(' ', '_')}",
        marks=() if (number, worker, place) in QUICK else pytest.mark.soak,
    )
    for number in (signal.SIGKILL, signal.SIGTERM)
    for worker, places in PLACES.items()
    for place in places
]


def assert_undisturbed(corpus: Path, runs: Path, workdir: Path, records: Path) -> None:
    """Runs the same command again, and compares the bits with a run without a fault."""
    run_well(arguments(corpus, workdir), records, 2)
    assert log(workdir) == log(runs / "2")
    for index in range(2):
        assert record(records, index)["weights"] == record(runs / "r2", index)["weights"]
    assert sorted(path.name for path in workdir.iterdir()) == sorted(
        path.name for path in (runs / "2").iterdir()
    )
    for folder in ("best", "checkpoints"):
        names = [
            sorted(path.name for path in (each / folder).iterdir())
            for each in (workdir, runs / "2")
        ]
        assert names[0] == names[1]


@pytest.mark.parametrize(("number", "victim", "place"), FAULTS)
def test_training_survives(
    number: signal.Signals, victim: int, place: str, runs: Path, corpus: Path, tmp_path: Path
) -> None:
    given, records = arguments(corpus, tmp_path / "run"), tmp_path / "records"
    ends = run([given] * 2, records, {victim: {"FAULT": f"{number.value}:{place}"}})
    outputs = "\n".join(output for _, output in ends)
    codes = [code for code, _ in ends]
    if number == signal.SIGKILL:
        assert (codes[victim], codes[1 - victim]) == (-signal.SIGKILL, 75), outputs
        (line,) = ends[1 - victim][1].splitlines()[-1:]
        assert "another worker was lost" in line and "resumes" in line
    else:  # both save a checkpoint after the step
        assert codes == [143, 143], outputs
        assert "stopped by SIGTERM" in ends[0][1]
    assert_undisturbed(corpus, runs, tmp_path / "run", records)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("place", ["meeting", "connection", "restore"])
def test_training_survives_at_the_start(
    number: signal.Signals, victim: int, place: str, runs: Path, corpus: Path, tmp_path: Path
) -> None:
    given = [*arguments(corpus, tmp_path / "run"), "--start_timeout=30"]
    records = tmp_path / "records"
    began = time.monotonic()
    ends = run([given] * 2, records, {victim: {"FAULT": f"{number.value}:{place} 1"}})
    outputs = "\n".join(output for _, output in ends)
    codes = [code for code, _ in ends]
    if number == signal.SIGTERM and place == "restore":  # they stop after the first step
        assert codes == [143, 143], outputs
    else:
        assert codes[victim] == -number, outputs
        assert codes[1 - victim] in (75, -signal.SIGKILL), outputs
        line = ends[1 - victim][1].splitlines()[-1]
        assert line.startswith("error: ") and ("start all workers" in line or "resumes" in line)
    assert time.monotonic() - began < 300
    assert_undisturbed(corpus, runs, tmp_path / "run", records)


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_worker_counts_as_lost(
    victim: int, runs: Path, corpus: Path, tmp_path: Path
) -> None:
    """Stops a worker for a minute. The other one ends, and then the worker that was stopped."""
    given, records = arguments(corpus, tmp_path / "run"), tmp_path / "records"
    records.mkdir()
    with Processes() as processes:
        fault = {victim: {"FAULT": f"{signal.SIGSTOP.value}:step 17"}}
        workers = start(processes, [given] * 2, records, fault)
        other, frozen = workers[1 - victim], workers[victim]
        code, output = finish(other)
        ended = time.monotonic()
        assert code == 75 and "another worker was lost" in output
        time.sleep(max(0.0, 60 - (time.monotonic() - ended)))
        frozen.send_signal(signal.SIGCONT)
        code, output = finish(frozen)
        assert code not in (0, None), output
    assert_undisturbed(corpus, runs, tmp_path / "run", records)
