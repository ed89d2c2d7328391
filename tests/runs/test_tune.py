"""tfwd-tune in this process: trials, files, resuming."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import sweep_tools
import tensorflow as tf
from stack_marks import SLOW_ON_KERAS_2, once, rest, soak
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from tfwd.lm.commands import train
from tfwd.lm.config import SCHEMA
from tfwd.lm.trainer import Trainer
from tfwd.runs.settings.command_line import call_function_in_file
from tfwd.runs.storage.metrics import read_metrics
from tfwd.runs.sweeps.trial_run import promote
from tfwd.runs.training.stop_signals import StopRequest
from tfwd.tuning import stopwatch

pytestmark = SLOW_ON_KERAS_2

SPACE = sweep_tools.SPACE


@pytest.mark.slow
def test_what_a_sweep_leaves(run, tmp_path, capsys):
    space = """{
        "model.weight_dropout": Choice([0.0, 0.4]),
        "optimizer.name": Choice(["adam", "sgd"]),
        "model.hidden_units": Choice([(4,), (5, 4)]),
    }"""
    code, out, err = run(space, "max_trials=2, executions_per_trial=2, seed=1")
    assert (code, err) == (0, "")
    folder = tmp_path / "sweep"
    rows = sweep_tools.table(folder)
    assert [row["trial"] for row in rows] == ["0", "1"]
    assert {row["seeds"] for row in rows} == {"0 1"} and {row["epochs"] for row in rows} == {"1"}
    for row in rows:
        losses = []
        for execution in (0, 1):
            trial = folder / f"trial_{row['trial']}" / f"run-{execution}"
            config = json.loads((trial / "config.json").read_text())
            assert config["seed"] == execution
            assert config["model"]["weight_dropout"] == float(row["model.weight_dropout"])
            assert config["optimizer"]["name"] == row["optimizer.name"]
            units = ",".join(map(str, config["model"]["hidden_units"]))
            assert units == row["model.hidden_units"]
            records = read_metrics(trial / "metrics.jsonl")
            losses.append(min(r["loss"] for r in records if r["kind"] == "valid"))
            assert (trial / "best").exists() and not (trial / "checkpoints").exists()
        assert losses[0] != losses[1]
        assert [float(text) for text in row["run_losses"].split()] == losses
        assert float(row["valid_loss"]) == pytest.approx(np.mean(losses), rel=1e-12)
        assert float(row["valid_perplexity"]) == pytest.approx(np.exp(np.mean(losses)))
    best = min(rows, key=lambda row: float(row["valid_loss"]))
    assert f"best: trial {best['trial']} with model.weight_dropout" in out
    assert [path.name for path in (folder / "plots").glob("*.png")] == ["trials.png"]
    for path in (folder / "plots").iterdir():
        assert path.stat().st_size > 8_000 and str(path) in out

    # The best configuration, as a file for tfwd-train, trains to the same loss.
    config = call_function_in_file("config", str(folder / "best_config.py"), "get_config", SCHEMA)
    assert config.optimizer.name == best["optimizer.name"]
    summary = train.train(config, str(tmp_path / "best"), StopRequest())
    found = summary["texts"]["valid"]["nats"]
    assert found == pytest.approx(float(best["run_losses"].split()[0]), rel=1e-6)

    hparams_are_seen(folder, rows)


def hparams_are_seen(folder: Path, rows: list[dict[str, str]]) -> None:
    def read(path: Path, tag: str) -> plugin_data_pb2.HParamsPluginData:
        board = EventAccumulator(str(path)).Reload()
        content = board.SummaryMetadata(tag).plugin_data.content
        return plugin_data_pb2.HParamsPluginData.FromString(content)

    space = read(folder / "tensorboard", "_hparams_/experiment").experiment
    assert [info.name for info in space.hparam_infos] == [
        "model.weight_dropout",
        "optimizer.name",
        "model.hidden_units",
    ]
    assert list(space.hparam_infos[1].domain_discrete) == ["adam", "sgd"]
    for row in rows:
        path = folder / f"trial_{row['trial']}" / "run-1" / "tensorboard"
        start = read(path, "_hparams_/session_start_info").session_start_info
        assert start.group_name == row["trial"]
        values = start.hparams
        assert values["model.weight_dropout"].number_value == float(row["model.weight_dropout"])
        assert values["model.hidden_units"].string_value == row["model.hidden_units"]
        board = EventAccumulator(str(path)).Reload()
        (event,) = board.Tensors("sweep/valid_perplexity")
        loss = float(row["run_losses"].split()[1])
        found = float(tf.make_ndarray(event.tensor_proto))
        assert found == pytest.approx(np.exp(loss), rel=1e-6)
        assert "valid/perplexity" in board.Tags()["tensors"]  # the curves stand beside them


@once
@soak
def test_hyperband_promotes_a_trial_as_if_it_had_not_been_stopped(run, tmp_path, root):
    """Checks bit for bit that a promoted trial has the losses of a run of all epochs."""
    space = '{"model.weight_dropout": Float(0.2, 0.6)}'
    code, out, _ = run(space, 'method="hyperband", factor=2', epochs=2)
    assert code == 0 and "bracket 1: 2 of 1 epochs, the best 1 of 2 epochs" in out
    folder = tmp_path / "sweep"
    (row,) = (row for row in sweep_tools.table(folder) if row["promoted_from"])
    assert row["epochs"] == "2"
    parent = next(r for r in sweep_tools.table(folder) if r["trial"] == row["promoted_from"])
    assert row["model.weight_dropout"] == parent["model.weight_dropout"]
    assert parent["epochs"] == "1"

    def log(path):
        drop = ("tokens_per_second",)
        records = read_metrics(path / "metrics.jsonl")
        return [{k: v for k, v in record.items() if k not in drop} for record in records]

    promoted = folder / f"trial_{row['trial']}" / "run-0"
    values = json.loads((promoted / "config.json").read_text())
    assert values["training"]["epochs"] == 2
    config = call_function_in_file(
        "config", str(root / "configs" / "quickstart.py"), "get_config", SCHEMA
    )
    config.update({name: group for name, group in values.items() if name != "model"})
    config.model.update({**values["model"], "hidden_units": (4,)})
    train.train(config, str(tmp_path / "straight"), StopRequest())
    assert log(promoted) == log(tmp_path / "straight")


def test_a_promoted_run_begins_with_the_files_of_its_parent(tmp_path):
    parent, folder = tmp_path / "trial_0", tmp_path / "trial_1"
    for name in ("checkpoints/step-3/tensors.index", "best/step-2/progress.json", "metrics.jsonl"):
        (parent / name).parent.mkdir(parents=True, exist_ok=True)
        (parent / name).write_text(name)
    kept = {path.relative_to(parent) for path in parent.rglob("*")}
    for name in (".lock", "events.out.1", stopwatch.FILE):  # the parent's own
        (parent / name).write_text("")
    (tmp_path / ".trial_1.new").mkdir()  # a copy that was stopped has it
    promote(parent, folder)
    assert {path.relative_to(folder) for path in folder.rglob("*")} == kept
    assert (folder / "metrics.jsonl").read_text() == "metrics.jsonl"
    assert not (tmp_path / ".trial_1.new").exists()
    (folder / "metrics.jsonl").write_text("longer")
    promote(parent, folder)  # it has begun, and resumes
    assert (folder / "metrics.jsonl").read_text() == "longer"


class StopAfter(StopRequest):
    """A check for stops that acts as Ctrl-C does at the time of check number `looks`."""

    looks = 0

    def __bool__(self):
        StopAfter.looks -= 1
        self.number = signal.SIGINT
        return StopAfter.looks < 0


@once
@pytest.mark.slow
def test_a_sweep_that_was_stopped_again_and_again_resumes(run, tmp_path, monkeypatch):
    """Checks stops before the first trial, within it, and within the second."""
    code, _, _ = run(workdir="whole")
    assert code == 0
    for looks, done in ((0, 0), (20, 0), (45, 1)):
        StopAfter.looks = looks
        with monkeypatch.context() as patch:
            patch.setattr("tfwd.runs.sweeps.tune_command.StopRequest", StopAfter)
            code, out, err = run()
        assert (code, err) == (130, "")
        states = [row["status"] for row in sweep_tools.table(tmp_path / "sweep")]
        assert states == ["done"] * done + ["waiting"] * (looks > 0)
        assert f"stopped; the same command, with --workdir={tmp_path / 'sweep'}, resumes" in out
    code, out, _ = run()
    assert code == 0 and "resuming the sweep: 1 trials are done" in out
    keys = ["trial", "status", "model.weight_dropout", "valid_loss", "epochs"]
    parts = [[row[key] for key in keys] for row in sweep_tools.table(tmp_path / "sweep")]
    assert parts == [[row[key] for key in keys] for row in sweep_tools.table(tmp_path / "whole")]
    code, out, _ = run(SPACE, "max_trials=3")  # one more, and nothing again
    assert code == 0 and "resuming the sweep: 2 trials are done" in out
    assert [row["status"] for row in sweep_tools.table(tmp_path / "sweep")] == ["done"] * 3


@rest
def test_trials_that_diverge_or_crash_fail_and_the_sweep_continues(run, tmp_path, monkeypatch):
    whole = Trainer._end_epoch

    def crash(self, title):
        if self.config.optimizer.learning_rate == 0.02:
            raise RuntimeError("an error of ours")
        whole(self, title)

    monkeypatch.setattr(Trainer, "_end_epoch", crash)
    space = '{"optimizer.learning_rate": Choice([0.01, 0.02, 1e30])}'
    more = ["--config.optimizer.name=sgd", "--config.optimizer.clip_norm=0"]
    code, out, err = run(space, 'method="grid"', *more)
    assert (code, err) == (0, "")
    fine, crashed, diverged = sweep_tools.table(tmp_path / "sweep")
    assert [row["status"] for row in (fine, crashed, diverged)] == ["done", "failed", "failed"]
    # Which weight overflows first depends on how a processor rounds.
    # It depends on the processor's rounding whether a weight or a layer overflows first.
    where = r"(weight language_model/\S+|layer \w+)"
    assert re.fullmatch(rf"diverged at step \d+ in {where}", diverged["message"])
    assert crashed["message"] == "RuntimeError: an error of ours"
    error = tmp_path / "sweep" / f"trial_{crashed['trial']}" / "error.txt"
    assert "Traceback" in error.read_text() and "in crash" in error.read_text()
    assert f"trial {crashed['trial']}" in out and "failed: RuntimeError: an error of ours" in out


def test_dry_run_prints_the_space_and_the_number_of_trials(run, tmp_path):
    space = """{
        "model.weight_dropout": Float(0, 0.7, step=0.1),
        "optimizer.learning_rate": Float(1e-3, 1e-1, log=True),
    }"""
    code, out, err = run(space, "max_trials=7, executions_per_trial=3", "--dry_run", epochs=5)
    assert (code, err) == (0, "") and not (tmp_path / "sweep").exists()
    lines = [line.split() for line in out.splitlines()]
    assert ["model.weight_dropout", *["0", "to", "0.7,", "step", "0.1", "0.5", "8"]] in lines
    assert ["optimizer.learning_rate", *["0.001", "to", "0.1,", "log", "0.01", "any"]] in lines
    assert "trials: 7 of 3 runs each, total epochs: 105" in out
    code, out, _ = run(SPACE, 'method="grid"', "--dry_run", epochs=5)
    assert "trials: 8, total epochs: 40" in out
    code, out, _ = run(SPACE, "", "--dry_run", "--method=random", "--max_trials=9")
    assert "trials: 8, total epochs: 8" in out  # there are no more points
    code, out, _ = run(space, 'method="hyperband"', "--dry_run", epochs=9)
    assert "bracket 1: 9 of 1 epochs, the best 3 of 3 epochs, the best 1 of 9 epochs" in out
    assert "trials: 23 (a promotion counts as a trial), total epochs: 75" in out
