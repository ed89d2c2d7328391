"""tfwd-tune in this process: trials, what it leaves, going on, and what goes wrong."""

import csv
import json
import math
import os
import signal
from pathlib import Path

import keras_tuner
import numpy as np
import pytest
import sweep_tools
import tensorflow as tf
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from tfwd.lm import train, tune
from tfwd.lm.command_line import from_file
from tfwd.lm.metrics import read_metrics
from tfwd.lm.signals import StopRequest
from tfwd.lm.sweeps.board import Board
from tfwd.lm.sweeps.folder import SweepFolder
from tfwd.lm.trainer import Trainer
from tfwd.tuning import Float, make_oracle
from tfwd.tuning.space import hyperparameters

SPACE = sweep_tools.SPACE


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    sweep_tools.forget_others(monkeypatch)


@pytest.fixture
def run(tmp_path, root, capsys):
    """`run(space, options, *arguments, **training)`: the exit code and what was printed."""

    def start(*arguments, **options):
        return sweep_tools.tune(tmp_path, root, capsys, *arguments, **options)

    return start


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / "trials.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_what_a_sweep_leaves(run, tmp_path, capsys):
    space = """{
        "model.weight_dropout": Choice([0.0, 0.4]),
        "optimizer.name": Choice(["adam", "sgd"]),
        "model.hidden_units": Choice([(4,), (5, 4)]),
    }"""
    code, out, err = run(space, "max_trials=2, executions_per_trial=2, seed=1")
    assert (code, err) == (0, "")
    folder = tmp_path / "sweep"
    rows = table(folder)
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
    names = {"weight_dropout", "name", "hidden_units", "together", "pairs"}
    assert {path.stem for path in (folder / "plots").glob("*.png")} == names
    for path in (folder / "plots").iterdir():
        assert path.stat().st_size > 8_000 and str(path) in out

    # The best configuration, as a file for tfwd-train, trains to the very same loss.
    config = from_file("config", str(folder / "best_config.py"), "get_config")
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


def test_hyperband_goes_on_as_if_a_trial_had_not_been_stopped(run, tmp_path, root):
    """The promoted trial's losses are, bit for bit, those of a run of all epochs."""
    space = '{"model.weight_dropout": Float(0.2, 0.6)}'
    code, out, _ = run(space, 'method="hyperband", factor=2', epochs=2)
    assert code == 0 and "bracket 1: 2 of 1 epochs, the best 1 of 2 epochs" in out
    folder = tmp_path / "sweep"
    (row,) = (row for row in table(folder) if row["promoted_from"])
    assert row["epochs"] == "2"
    parent = next(r for r in table(folder) if r["trial"] == row["promoted_from"])
    assert row["model.weight_dropout"] == parent["model.weight_dropout"]
    assert parent["epochs"] == "1"

    def log(path):
        drop = ("tokens_per_second",)
        records = read_metrics(path / "metrics.jsonl")
        return [{k: v for k, v in record.items() if k not in drop} for record in records]

    promoted = folder / f"trial_{row['trial']}" / "run-0"
    values = json.loads((promoted / "config.json").read_text())
    assert values["training"]["epochs"] == 2
    config = from_file("config", str(root / "configs" / "quickstart.py"), "get_config")
    config.update({name: group for name, group in values.items() if name != "model"})
    config.model.update({**values["model"], "hidden_units": (4,)})
    train.train(config, str(tmp_path / "straight"), StopRequest())
    assert log(promoted) == log(tmp_path / "straight")


class StopAfter(StopRequest):
    """As if Ctrl-C came at the time of the `looks`-th look."""

    looks = 0

    def __bool__(self):
        StopAfter.looks -= 1
        self.number = signal.SIGINT
        return StopAfter.looks < 0


def test_a_sweep_that_was_stopped_again_and_again_goes_on(run, tmp_path, monkeypatch):
    """Before the first trial, in the middle of it, in the middle of the second."""
    code, _, _ = run(workdir="whole")
    assert code == 0
    for looks, done in ((0, 0), (20, 0), (45, 1)):
        StopAfter.looks = looks
        with monkeypatch.context() as patch:
            patch.setattr(tune, "StopRequest", StopAfter)
            code, out, err = run()
        assert (code, err) == (130, "")
        states = [row["status"] for row in table(tmp_path / "sweep")]
        assert states == ["done"] * done + ["waiting"] * (looks > 0)
        assert f"stopped; the same command, with --workdir={tmp_path / 'sweep'}, goes on" in out
    code, out, _ = run()
    assert code == 0 and "going on with the sweep: 1 trials are done" in out
    keys = ["trial", "status", "model.weight_dropout", "valid_loss", "epochs"]
    parts = [[row[key] for key in keys] for row in table(tmp_path / "sweep")]
    assert parts == [[row[key] for key in keys] for row in table(tmp_path / "whole")]
    code, out, _ = run(SPACE, "max_trials=3")  # one more, and nothing again
    assert code == 0 and "going on with the sweep: 2 trials are done" in out
    assert [row["status"] for row in table(tmp_path / "sweep")] == ["done"] * 3


def test_trials_that_diverge_or_crash_are_failed_and_the_sweep_goes_on(run, tmp_path, monkeypatch):
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
    fine, crashed, diverged = table(tmp_path / "sweep")
    assert [row["status"] for row in (fine, crashed, diverged)] == ["done", "failed", "failed"]
    assert "is not finite" in diverged["message"] and "\n" not in diverged["message"]
    assert crashed["message"] == "RuntimeError: an error of ours"
    error = tmp_path / "sweep" / f"trial_{crashed['trial']}" / "error.txt"
    assert "Traceback" in error.read_text() and "in crash" in error.read_text()
    assert f"trial {crashed['trial']}" in out and "failed: RuntimeError: an error of ours" in out


def test_if_no_trial_comes_to_its_end_it_is_an_error_with_the_reason(run):
    more = ["--config.optimizer.name=sgd", "--config.optimizer.clip_norm=0"]
    code, _, err = run('{"optimizer.learning_rate": Choice([1e30])}', 'method="grid"', *more)
    assert code == 1
    assert err.startswith("error: no trial came to its end; the first one: step ")
    assert err.count("\n") == 1


def test_a_full_disk_ends_the_sweep_and_the_trial_is_not_failed(run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        code, _, err = run(SPACE, "max_trials=1")
    assert code == 1 and err.count("\n") == 1 and "No space left" in err
    assert run(SPACE, "max_trials=1")[0] == 0
    assert [row["status"] for row in table(tmp_path / "sweep")] == ["done"]


def test_another_sweep_in_the_folder_is_refused(run, tmp_path):
    assert run(SPACE, "max_trials=1")[0] == 0
    before = (tmp_path / "sweep" / "trials.csv").read_bytes()
    other = '{"model.weight_dropout": Float(0, 0.6, step=0.1)}'
    code, _, err = run(other)
    assert code == 1 and err.count("\n") == 1
    assert "holds another sweep: space model.weight_dropout is 0 to 0.7, step 0.1 there" in err
    assert "or --overwrite" in err
    code, _, err = run(SPACE, "max_trials=2", "--config.model.input_dropout=0.1")
    assert code == 1 and "model.input_dropout is 0.3 there and 0.1 here" in err
    code, _, err = run(epochs=2)
    assert code == 1 and "training.epochs is 1 there and 2 here" in err
    assert (tmp_path / "sweep" / "trials.csv").read_bytes() == before
    code, out, _ = run(other, "max_trials=1", "--overwrite")
    assert code == 0 and "going on" not in out and len(table(tmp_path / "sweep")) == 1


def test_a_folder_with_something_else_is_refused(run, tmp_path):
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for more in ([], ["--overwrite"]):
        code, _, err = run(SPACE, "max_trials=2", *more)
        assert code == 1 and "holds something that is no sweep of tfwd-tune" in err
    assert (folder / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("space", "options", "message"),
    [
        ('{"model.weight_dropot": Float(0, 0.7)}', "", "did you mean model.weight_dropout?"),
        ('{"weight_dropout": Float(0, 0.7)}', "", "did you mean model.weight_dropout?"),
        ('{"model.weight_dropout": Float(0, 1)}', "", "=1.0 in the sweep: give a rate"),
        ('{"model.weight_dropout": 0.5}', "", "give Float(0, 0.7, step=0.1), Int or Choice"),
        ('{"model.weight_dropout": Float(0.7, 0)}', "", "sweep.py, line 5: Float(low=0.7"),
        ('{"data.window": Float(10, 20)}', "", "data.window=10.0 in the sweep: give"),
        ('{"model.hidden_units": Choice([(4, 5)])}', "", "no point of the sweep can be trained"),
        ("{}", "", "the sweep has no space"),
        (SPACE, 'method="gird"', "give random, grid, bayesian, hyperband (did you mean grid?)"),
        (SPACE, "max_trials=0", "max_trials=0 of the sweep: give a whole number, at least 1"),
        (SPACE, 'method="hyperband", max_trials=3', "leave it out"),
        (SPACE, "trials=3", "unexpected keyword argument 'trials'"),
        ('{"training.epochs": Choice([1, 2])}', 'method="hyperband"', "leave it out"),
        (SPACE, 'method="hyperband", factor=2, iterations=1', "draws 10 different points"),
        ('{"optimizer.kwargs.momentun": Float(0, 0.9)}', "", "adam has no such argument"),
    ],
)
def test_a_wrong_sweep_is_one_line_before_the_first_trial(run, tmp_path, space, options, message):
    code, out, err = run(space, options, epochs=4)
    assert code == 1 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep=no/such.py"], "--sweep=no/such.py: there is no such file"),
        (["--sweep="], "--sweep is missing"),
        (["--workdir="], "give a folder for the sweep"),
        (["--max_trials=0"], "max_trials"),
        (["--config.data.path=no/such/text"], "no/such/text"),
    ],
)
def test_a_wrong_command_line_is_one_line(run, arguments, message):
    code, _, err = run(SPACE, "", *arguments)
    assert code == 1 and err.count("\n") == 1 and message in err


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
    assert "trials: 7 of 3 runs each, epochs in all: 105" in out
    code, out, _ = run(SPACE, 'method="grid"', "--dry_run", epochs=5)
    assert "trials: 8, epochs in all: 40" in out
    code, out, _ = run(SPACE, "", "--dry_run", "--method=random", "--max_trials=9")
    assert "trials: 8, epochs in all: 8" in out  # there are no more points
    code, out, _ = run(space, 'method="hyperband"', "--dry_run", epochs=9)
    assert "bracket 1: 9 of 1 epochs, the best 3 of 3 epochs, the best 1 of 9 epochs" in out
    assert "trials: 23 (a promotion counts as one of its own), epochs in all: 75" in out


def test_without_keras_tuner_the_extra_is_named(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run()
    assert code == 1
    assert err == "error: tfwd-tune needs keras-tuner: pip install 'tfwd[tune]'\n"


def test_the_live_table_shows_what_is_under_way(tmp_path):
    space, now = {"model.weight_dropout": Float(0, 0.7, step=0.1)}, [0.0]
    with open(os.devnull, "w") as nowhere:
        console = Console(width=90, height=14, record=True, force_terminal=True, file=nowhere)
        folder = SweepFolder(tmp_path)
        board = Board(space, folder, 4, (0, 1), console=console, clock=lambda: now[0])
        board.total = 8
        objective = keras_tuner.Objective("loss", "min")
        oracle = make_oracle("grid", objective, hyperparameters(space), watcher=board)
        oracle._set_project_dir(str(tmp_path), "sweep")

        def shown():
            console.print(board._shown())
            return console.export_text()

        first = oracle.create_trial("one")
        board.progress(first.trial_id, 1, 2, 0.5, math.log(50))
        now[0] = 75.0
        text = shown()
        for part in ("0 of 8 trials", "50.00", "2/4", "1:15", "run 2 of 2, 50% of an epoch"):
            assert part in text
        for number in range(8):
            trial = first if number == 0 else oracle.create_trial("one")
            if number == 3:
                trial.status, trial.message = "INVALID", "Traceback\nValueError: too bad"
            else:
                metrics = {"loss": math.log(60 + number), "loss-0": 1.0, "epochs": 4}
                oracle.update_trial(trial.trial_id, {**metrics, "seconds": 61.0})
                trial.status = "COMPLETED"
            oracle.end_trial(trial)
        text = shown()
        assert "trial 0003 failed: ValueError: too bad" in text
        assert "8 of 8 trials" in text and "60.00" in text and "1:01" in text
        assert "best" in next(line for line in text.splitlines() if line.startswith(" 0000 "))
        rows = [line for line in text.splitlines() if line[1:5].isdigit()]
        assert len(rows) == 6  # what fits
        assert any(line.startswith(" 0007 ") for line in rows)  # the newest is among them


def test_a_second_process_is_kept_out(run, tmp_path):
    folder = SweepFolder(tmp_path / "sweep")
    folder.open({}, overwrite=False)
    try:
        code, _, err = run()
        assert code == 1 and "another process searches in the workdir" in err
    finally:
        folder.close()
