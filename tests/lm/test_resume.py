"""Runs in processes of their own that are stopped, killed and damaged, and then resume."""

import json
import os
import signal
from pathlib import Path

import pytest
from stack_marks import once, soak
from watched_processes import SIGNAL_AT, WATCHDOG, Processes, finish

from tfwd.runs.storage.checkpoint import Checkpoints

# This tests code of the programs. On Keras 2 one of these tests is enough.
pytestmark = pytest.mark.slow

PROGRAM = (
    f"{SIGNAL_AT}import sys; sys.argv[0] = 'tfwd-train';"
    "from tfwd.lm.commands.train import run; run()"
)
CONFIG = """
from tfwd.lm.config import default_config

def get_config():
    config = default_config()
    config.data.path = {text!r}
    config.data.batch_size = 4
    config.data.eval_batch_size = 2
    config.data.window = 8
    config.model.embedding_dim = 8
    config.model.hidden_units = (10, 8)
    config.model.variational_noise = 0.01
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 0.01
    config.optimizer.weight_decay = 0.1
    config.optimizer.decay_exclude = "bias"
    config.optimizer.non_monotone_interval = 1
    config.training.epochs = 2
    config.training.lr_decay_factor = 0.5
    config.training.checkpoint_steps = 7
    config.training.log_steps = 3
    config.training.deterministic = True
    config.training.tensorboard = False
    config.sample.tokens = 5
    return config
"""
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
TIMED = ("tokens_per_second",)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Writes a config file, and a text of ten words in an order that can be learned in part."""
    folder = tmp_path_factory.mktemp("run")
    place, lines = 1, []
    for _ in range(450):
        line = []
        for _ in range(7):
            place = (place * 7 + 3 + len(line)) % 101
            line.append(WORDS[place % 10])
        lines.append(" ".join(line))
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    path = folder / "config.py"
    path.write_text(CONFIG.format(text=str(folder / "text.txt")))
    return path


def start(processes, config, workdir, *arguments, at=None):
    """Starts tfwd-train; with `at=(signal, step)` it sends itself the signal after that step."""
    flags = [f"--config={config}", f"--workdir={workdir}", *arguments]
    return processes.python(PROGRAM, flags, {"SIGNAL_AT": f"{at[0]:d}:{at[1]}"} if at else {})


def records(workdir):
    lines = (Path(workdir) / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{k: v for k, v in record.items() if k not in TIMED} for record in found]


def summary(workdir):
    found = json.loads((Path(workdir) / "report" / "summary.json").read_text())
    return {k: v for k, v in found.items() if k not in TIMED}


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """Returns the run that was never stopped."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    with Processes() as processes:
        code, output = finish(start(processes, config, workdir))
    assert code == 0, output
    found = records(workdir)
    assert len(found) > 50 and sum(record["kind"] == "valid" for record in found) == 2
    return workdir


def assert_same_run(workdir, whole):
    assert records(workdir) == records(whole)
    assert summary(workdir) == summary(whole)
    sample = Path("report", "sample.txt")
    assert (workdir / sample).read_text() == (whole / sample).read_text()


def is_mid_epoch(checkpoints, epoch):
    progress = checkpoints.progress(checkpoints.steps()[-1])
    return progress["epoch"] == epoch and progress["window"] > 0


@once
def test_killed_twice_ends_as_if_never_stopped(config, whole, tmp_path, processes):
    workdir = tmp_path / "run"
    checkpoints = Checkpoints(workdir / "checkpoints")
    steps_of_an_epoch = next(r["step"] for r in records(whole) if r["kind"] == "valid")
    for epoch, step in ((0, steps_of_an_epoch // 3), (1, steps_of_an_epoch * 4 // 3)):
        code, output = finish(start(processes, config, workdir, at=(signal.SIGKILL, step)))
        assert code == -signal.SIGKILL, output
        assert checkpoints.steps()[-1] == (step - 1) // 7 * 7  # it is saved after the signal
        assert is_mid_epoch(checkpoints, epoch)
    code, output = finish(start(processes, config, workdir))
    assert code == 0, output
    assert "resuming from the checkpoint of step" in output
    assert_same_run(workdir, whole)


@once
def test_asked_to_stop_loses_no_step(config, whole, tmp_path, processes):
    workdir = tmp_path / "run"
    for number, code, step in ((signal.SIGINT, 130, 16), (signal.SIGTERM, 143, 41)):
        arguments = ("--config.training.checkpoint_steps=0",)
        found, output = finish(start(processes, config, workdir, *arguments, at=(number, step)))
        assert found == code, output
        assert f"stopped by {number.name}" in output and str(workdir) in output
        # The step under way is in it, and the log had no later one.
        assert Checkpoints(workdir / "checkpoints").steps()[-1] == step
        assert records(workdir)[-1]["step"] == step - step % 3
    code, output = finish(start(processes, config, workdir))
    assert code == 0 and f"step {step:,}" in output, output
    assert_same_run(workdir, whole)


@once
def test_a_stop_waits_for_the_update(config, tmp_path, processes):
    """Stops a run with an update in every third step, which saves where nothing is gathered."""
    flags = "--config.optimizer.steps_per_update=3", "--config.training.checkpoint_steps=0"
    code, output = finish(start(processes, config, tmp_path / "whole", *flags))
    assert code == 0, output
    workdir = tmp_path / "run"
    at = (signal.SIGTERM, 16)
    code, output = finish(start(processes, config, workdir, *flags, at=at))
    assert code == 143, output
    assert Checkpoints(workdir / "checkpoints").steps()[-1] == 18
    code, output = finish(start(processes, config, workdir, *flags))
    assert code == 0, output
    assert_same_run(workdir, tmp_path / "whole")


@once
def test_a_truncated_checkpoint_is_passed_over(config, whole, tmp_path, processes):
    workdir = tmp_path / "run"
    checkpoints = Checkpoints(workdir / "checkpoints")
    finish(start(processes, config, workdir, at=(signal.SIGKILL, 24)))
    before, last = checkpoints.steps()[-2:]
    assert (before, last) == (14, 21)
    (data,) = checkpoints.path(last).glob("tensors.data*")
    os.truncate(data, data.stat().st_size // 2)
    code, output = finish(start(processes, config, workdir))
    assert code == 0, output
    assert f"{data.name} has" in output and "trying the previous checkpoint" in output
    assert f"resuming from the checkpoint of step {before}" in output
    assert (checkpoints.folder / f"broken-{checkpoints.path(last).name}").is_dir()
    assert_same_run(workdir, whole)


@once
def test_a_finished_run_prints_its_report_again(config, whole, processes):
    log = (whole / "metrics.jsonl").read_bytes()
    code, output = finish(start(processes, config, whole))
    assert code == 0 and "is finished" in output and "perplexity" in output, output
    assert (whole / "metrics.jsonl").read_bytes() == log


@soak
@once
def test_output_that_nobody_reads_any_more_is_a_stop(config, whole, tmp_path, processes):
    """Checks `tfwd-train ... | head -1`: the trained part is saved, and the rest follows."""
    workdir = tmp_path / "run"
    talkative = """
import time
from tfwd.lm.trainer import Display
Display.window = lambda self, *facts: (self.line("a window"), time.sleep(0.05))
"""
    command = f"{talkative}{PROGRAM}"
    flags = [f"--config={config}", f"--workdir={workdir}", "--config.training.checkpoint_steps=0"]
    process = processes.python(command, flags)
    while "a window" not in process.stdout.readline():
        pass
    process.stdout.close()
    assert process.wait(timeout=WATCHDOG) == 128 + signal.SIGPIPE
    (step,) = Checkpoints(workdir / "checkpoints").steps()
    assert step > 0
    code, output = finish(start(processes, config, workdir))
    assert code == 0 and f"resuming from the checkpoint of step {step:,}" in output, output
    assert_same_run(workdir, whole)
