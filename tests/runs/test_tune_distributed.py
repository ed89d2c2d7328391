"""A sweep that a chief and two workers share over the loopback address; one worker is killed."""

import csv
import json
import re
import signal
from pathlib import Path

import pytest
from stack_marks import once
from sweep_tools import SWEEP, tiny_flags
from watched_processes import SIGNAL_AT, finish

from tfwd.runs.workers.local_workers import free_ports

pytestmark = [pytest.mark.slow, once]

TRIALS, EPOCHS = 4, 3
PROGRAM = f"{SIGNAL_AT}import tfwd_programs; tfwd_programs.tune()"


def ongoing(workdir: Path) -> dict[str, str]:
    try:
        return json.loads((workdir / "oracle.json").read_text())["ongoing_trials"]
    except FileNotFoundError:
        return {}


def test_a_worker_that_is_killed_loses_no_trial(tmp_path, root, processes):
    workdir, sweep = tmp_path / "sweep", tmp_path / "sweep.py"
    port = str(free_ports(1)[0])
    sweep.write_text(SWEEP)
    flags = tiny_flags(tmp_path, root, epochs=EPOCHS, checkpoint_steps=20)
    flags += [f"--sweep={sweep}", f"--workdir={workdir}", f"--max_trials={TRIALS}"]
    flags += ["--worker_timeout=12"]

    def start(name: str, **more: str):
        names = {"TUNER_ID": name, "ORACLE_IP": "127.0.0.1", "ORACLE_PORT": port}
        variables = {f"KERASTUNER_{key}": value for key, value in names.items()}
        return processes.python(PROGRAM, flags, {**variables, "OMP_NUM_THREADS": "1", **more})

    chief = start("chief")
    two = start("two", SIGNAL_AT=f"{signal.SIGKILL:d}:30")  # in the second epoch of its first trial
    processes.wait_for(lambda: set(ongoing(workdir)) == {"two"}, "the first trial")
    one = start("one")
    assert finish(two)[0] == -signal.SIGKILL
    (chief_code, chief_said), (code, worker) = finish(chief), finish(one)
    assert chief_code == 0, chief_said
    assert code == 0, worker
    (lost,) = re.findall(r"two is silent: trial (\d+) waits for another worker", chief_said)
    with open(workdir / "trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == [str(number) for number in range(TRIALS)]
    assert {row["status"] for row in rows} == {"done"}
    assert {row["epochs"] for row in rows} == {str(EPOCHS)}
    state = json.loads((workdir / "oracle.json").read_text())
    assert not state["ongoing_trials"] and not state["retry_queue"]
    assert sorted(state["end_order"]) == [row["trial"] for row in rows]
    # The other worker resumed from the lost worker's checkpoint, and did not begin again.
    log = (workdir / f"trial_{lost}" / "run-0" / "log.txt").read_text()
    assert log.count(f"epoch 1/{EPOCHS}  perplexity") == 1
    assert f"trial {lost}" in worker and "the chief has no more trials" in worker
