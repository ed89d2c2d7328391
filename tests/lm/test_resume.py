"""Runs in processes of their own that are stopped, killed and damaged, and then go on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfwd.lm.checkpoint import Checkpoints

pytestmark = pytest.mark.slow

PROGRAM = "import sys; sys.argv[0] = 'tfwd-train'; from tfwd.lm.train import run; run()"
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
    """A config file, and a text of ten words in an order that can be learnt in part."""
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


def command(config, workdir, *arguments):
    return [
        sys.executable,
        "-c",
        PROGRAM,
        f"--config={config}",
        f"--workdir={workdir}",
        *arguments,
    ]


def start(config, workdir, *arguments):
    return subprocess.Popen(
        command(config, workdir, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )


def finish(process):
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def wait_for_step(process, workdir, step):
    """Waits until a checkpoint of at least `step` is there, while the process runs."""
    checkpoints = Checkpoints(Path(workdir) / "checkpoints")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        if checkpoints.steps() and checkpoints.steps()[-1] >= step:
            return checkpoints
        time.sleep(0.002)
    raise AssertionError("no checkpoint in time")


def records(workdir):
    lines = (Path(workdir) / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{k: v for k, v in record.items() if k not in TIMED} for record in found]


def summary(workdir):
    found = json.loads((Path(workdir) / "report" / "summary.json").read_text())
    return {k: v for k, v in found.items() if k not in TIMED}


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The run that was never stopped."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    code, output = finish(start(config, workdir))
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


def test_killed_twice_ends_as_if_never_stopped(config, whole, tmp_path):
    workdir = tmp_path / "run"
    steps_of_an_epoch = next(r["step"] for r in records(whole) if r["kind"] == "valid")
    for epoch, step in ((0, steps_of_an_epoch // 3), (1, steps_of_an_epoch * 4 // 3)):
        process = start(config, workdir)
        checkpoints = wait_for_step(process, workdir, step)
        process.send_signal(signal.SIGKILL)
        assert finish(process)[0] == -signal.SIGKILL
        assert is_mid_epoch(checkpoints, epoch)
    code, output = finish(start(config, workdir))
    assert code == 0, output
    assert "going on from the checkpoint of step" in output
    assert_same_run(workdir, whole)


def test_asked_to_stop_loses_no_step(config, whole, tmp_path):
    workdir, before = tmp_path / "run", 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = start(config, workdir, "--config.training.checkpoint_steps=0")
        while not (workdir / "metrics.jsonl").exists() or len(records(workdir)) < before + 5:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.002)
        process.send_signal(number)
        found, output = finish(process)
        assert found == code, output
        assert f"stopped by {number.name}" in output and str(workdir) in output
        step = Checkpoints(workdir / "checkpoints").steps()[-1]
        before = len(records(workdir))
        # The step under way is in it, and the log had no later one.
        assert records(workdir)[-1]["step"] <= step < records(workdir)[-1]["step"] + 3
    code, output = finish(start(config, workdir))
    assert code == 0 and f"step {step:,}" in output, output
    assert_same_run(workdir, whole)


def test_a_truncated_checkpoint_is_passed_over(config, whole, tmp_path):
    workdir = tmp_path / "run"
    process = start(config, workdir)
    checkpoints = wait_for_step(process, workdir, 20)
    process.kill()
    finish(process)
    before, last = checkpoints.steps()[-2:]
    (data,) = checkpoints.path(last).glob("tensors.data*")
    os.truncate(data, data.stat().st_size // 2)
    code, output = finish(start(config, workdir))
    assert code == 0, output
    assert f"{data.name} has" in output and "trying the checkpoint before it" in output
    assert f"going on from the checkpoint of step {before}" in output
    assert (checkpoints.folder / f"broken-{checkpoints.path(last).name}").is_dir()
    assert_same_run(workdir, whole)


def test_a_finished_run_prints_its_report_again(config, whole):
    log = (whole / "metrics.jsonl").read_bytes()
    code, output = finish(start(config, whole))
    assert code == 0 and "is finished" in output and "perplexity" in output, output
    assert (whole / "metrics.jsonl").read_bytes() == log
