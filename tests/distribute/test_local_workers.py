"""`--workers=2`: one display, and both processes end together, whichever of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from distribute.train_runs import FLAGS, arguments, write_corpus
from stack_marks import once
from watched_processes import Processes, finish

pytestmark = [
    once,
    pytest.mark.skipif(os.name == "nt", reason="Windows has no --workers"),
]

CODE = "import sys, tfwd_programs; sys.argv[0] = 'tfwd-train'; tfwd_programs.train()"


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    (tmp_path / "corpus").mkdir()
    corpus = write_corpus(tmp_path / "corpus")
    return [*arguments(corpus, tmp_path / "run", **{"gradients.every": 0}), "--workers=2"]


def children(parent: int) -> list[int]:
    """Returns the processes that a process has started."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
    pairs = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    return sorted(pid for pid, of in pairs if of == parent)


def is_running(pid: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(listed.stdout.strip()) and not listed.stdout.startswith("Z")


def wait_until_none_runs(pids: list[int]) -> None:
    end = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < end, "a worker still runs"
        time.sleep(0.1)


def start_and_wait_for_checkpoint(
    processes: Processes, given: list[str], run: Path
) -> tuple[subprocess.Popen[str], list[int]]:
    process = processes.python(CODE, [*given, "--config.training.epochs=2000"])
    processes.wait_for(lambda: list(run.glob("checkpoints/step-*")), "a checkpoint")
    workers = children(process.pid)
    assert len(workers) == 2
    return process, workers


def test_two_workers_show_one_display(given: list[str], tmp_path: Path) -> None:
    with Processes() as processes:
        code, output = finish(processes.python(CODE, given))
    assert code == 0, output
    epochs = FLAGS["training.epochs"]
    assert output.count("2 workers divide each batch") == 1
    assert (
        sum(line.startswith(f"epoch {epochs}/{epochs}  perp") for line in output.splitlines()) == 1
    )
    assert (tmp_path / "run" / "report" / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_ends_the_run_and_it_resumes(
    victim: int, given: list[str], tmp_path: Path
) -> None:
    with Processes() as processes:
        process, workers = start_and_wait_for_checkpoint(processes, given, tmp_path / "run")
        os.kill(workers[victim], signal.SIGKILL)
        code, output = finish(process)
    assert code == 75, output
    assert output.count("another worker was lost") == 1 and "resumes" in output
    assert not any(map(is_running, workers))
    with Processes() as processes:
        code, output = finish(processes.python(CODE, given))
    assert code == 0 and "resuming from the checkpoint" in output, output


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(given: list[str], tmp_path: Path) -> None:
    with Processes() as processes:
        process, workers = start_and_wait_for_checkpoint(processes, given, tmp_path / "run")
        process.kill()
        wait_until_none_runs(workers)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_all_workers_after_a_checkpoint(
    number: signal.Signals, code: int, given: list[str], tmp_path: Path
) -> None:
    with Processes() as processes:
        process, workers = start_and_wait_for_checkpoint(processes, given, tmp_path / "run")
        process.send_signal(number)
        found, output = finish(process)
    assert found == code, output
    assert output.count(f"stopped by {number.name}") == 1
    assert not any(map(is_running, workers))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--strategy=one"], "leave --strategy out"),
        (["--strategy=mirrored"], "TensorFlow finds no GPU on this machine"),
    ],
)
def test_flags_that_contradict_each_other(
    flags: list[str], line: str, given: list[str], tmp_path: Path
) -> None:
    with Processes() as processes:
        code, output = finish(processes.python(CODE, [*given, *flags]))
    assert code == 1 and line in output.splitlines()[-1], output
    assert not (tmp_path / "run").exists()
