"""A sweep that a chief and two workers share over the loopback address; one worker is killed."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sweep_tools import SWEEP, tiny_flags

pytestmark = pytest.mark.slow

TRIALS, EPOCHS = 4, 16


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def wait_for(condition: Callable[[], object], processes: list[subprocess.Popen], what: str) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def ongoing(workdir: Path) -> dict[str, str]:
    try:
        return json.loads((workdir / "oracle.json").read_text())["ongoing_trials"]
    except FileNotFoundError:
        return {}


def steps(workdir: Path, trial: str) -> int:
    log = workdir / f"trial_{trial}" / "run-0" / "metrics.jsonl"
    return log.read_text().count('"kind": "train"') if log.exists() else 0


def test_a_worker_that_is_killed_loses_no_trial(tmp_path, root):
    workdir, sweep, port = tmp_path / "sweep", tmp_path / "sweep.py", free_port()
    sweep.write_text(SWEEP)
    command = [sys.executable, "-c", "import tfwd_programs; tfwd_programs.tune()"]
    command += tiny_flags(tmp_path, root, epochs=EPOCHS, checkpoint_steps=20)
    command += [f"--sweep={sweep}", f"--workdir={workdir}", f"--max_trials={TRIALS}"]
    command += ["--worker_timeout=4"]

    def start(name: str) -> subprocess.Popen:
        names = {"TUNER_ID": name, "ORACLE_IP": "127.0.0.1", "ORACLE_PORT": port}
        variables = {f"KERASTUNER_{key}": value for key, value in names.items()}
        return subprocess.Popen(
            command,
            env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    started = {name: start(name) for name in ("chief", "one", "two")}
    try:
        alive = list(started.values())
        wait_for(lambda: set(ongoing(workdir)) == {"one", "two"}, alive, "two trials at once")
        lost = ongoing(workdir)["two"]
        wait_for(lambda: steps(workdir, lost) >= 30, alive, "the trial's first steps")
        assert ongoing(workdir)["two"] == lost  # it is in the middle of it
        started["two"].send_signal(signal.SIGKILL)
        assert started["two"].wait(timeout=20) == -signal.SIGKILL
        chief = started["chief"].communicate(timeout=240)[0]
        worker = started["one"].communicate(timeout=30)[0]
    finally:
        for process in started.values():
            process.kill()
            process.wait()
            process.stdout.close()
    assert started["chief"].returncode == 0, chief
    assert started["one"].returncode == 0, worker
    assert f"two is silent: trial {lost} waits for another worker" in chief
    with open(workdir / "trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == [str(number) for number in range(TRIALS)]
    assert {row["status"] for row in rows} == {"done"}
    assert {row["epochs"] for row in rows} == {str(EPOCHS)}
    state = json.loads((workdir / "oracle.json").read_text())
    assert not state["ongoing_trials"] and not state["retry_queue"]
    assert sorted(state["end_order"]) == [row["trial"] for row in rows]
    # The other worker went on with what the lost one had saved, and did not begin anew.
    log = (workdir / f"trial_{lost}" / "run-0" / "log.txt").read_text()
    assert log.count(f"epoch 1/{EPOCHS}  perplexity") == 1
    assert f"trial {lost}" in worker and "the chief has no more trials" in worker
