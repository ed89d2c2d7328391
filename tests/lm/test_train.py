"""tfwd-train in this process: a run's folder, resuming, and errors."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from stack_marks import SLOW_ON_KERAS_2, extended, once
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_loop_runs import WORDS, StopAfter, log, make_config, model_options

from tfwd.lm.commands.train import define, main, train
from tfwd.lm.data.splits_and_tokens import load_splits, tokenize
from tfwd.lm.data.vocabulary import Vocabulary
from tfwd.lm.evaluation import evaluate
from tfwd.lm.model import LanguageModel
from tfwd.lm.program import PROGRAM
from tfwd.lm.trainer import Trainer
from tfwd.runs import command_runner
from tfwd.runs.errors import UserError
from tfwd.runs.storage.checkpoint import Checkpoints
from tfwd.runs.storage.run_folder import RunFolder
from tfwd.runs.training.stop_signals import Stopped, StopRequest

pytestmark = SLOW_ON_KERAS_2


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """Returns a finished run, its summary and its folder."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    config = make_config(text, training__tensorboard=True, sample__tokens=5)
    return train(config, str(workdir), StopRequest()), workdir


def test_what_a_run_leaves(whole):
    summary, workdir = whole
    assert json.loads((workdir / "report" / "summary.json").read_text()) == summary
    names = {path.name for path in workdir.iterdir()}
    assert names >= {"config.json", "vocabulary.json", "metrics.jsonl", "checkpoints", "best"}
    assert (workdir / "report" / "curves.png").stat().st_size > 10_000
    assert len((workdir / "report" / "sample.txt").read_text().split()) <= 5
    records = log(workdir)
    assert [r["step"] for r in records if r["kind"] == "train"] == list(
        range(10, summary["step"] + 1, 10)
    )
    valid = [r for r in records if r["kind"] == "valid"]
    assert [r["epoch"] for r in valid] == [1, 2]
    assert summary["texts"]["valid"]["nats"] == min(r["loss"] for r in valid)
    assert summary["tokens_per_second"] > 0


def test_the_report_is_of_the_best_weights(whole, text):
    summary, workdir = whole
    splits, vocabulary = load_splits(str(text)), Vocabulary.load(workdir / "vocabulary.json")
    model = LanguageModel(len(vocabulary), **model_options(text))
    found = Checkpoints(workdir / "best").restore({"model": model})
    assert found["best_epoch"] == summary["best_epoch"]
    assert summary["parameters"] == model.count_params()
    for name in ("train", "valid", "test"):
        ids = vocabulary.encode(tokenize(getattr(splits, name), "word"))
        evaluation = evaluate(model, ids, batch_size=2, window=50)
        assert summary["texts"][name]["nats"] == pytest.approx(evaluation.nats, abs=1e-6)
        assert summary["texts"][name]["tokens"] == evaluation.tokens


def test_tensorboard_shows_everything(whole):
    _, workdir = whole
    board = EventAccumulator(str(workdir / "tensorboard")).Reload()
    tags = set(board.Tags()["tensors"])
    assert tags >= {
        f"train/{name}" for name in ("loss", "perplexity", "learning_rate", "gradient_norm")
    } | {"valid/loss", "valid/perplexity", "norm/language_model/embedding/embeddings"}
    assert any(tag.startswith("norm/") and tag.endswith("recurrent_kernel") for tag in tags)


@pytest.mark.parametrize("looks", [7, pytest.param(29, marks=pytest.mark.slow)])
def test_a_stop_anywhere_is_resumed(whole, text, tmp_path, looks, capsys, monkeypatch):
    """Checks stops in the first epoch's training and in its validation."""
    summary, finished = whole
    config = make_config(text)
    seen = []  # the states that windows pass on, at the start of a trainer and when it saves

    class Watched(Trainer):
        def __init__(self, *args):
            super().__init__(*args)
            self.look()

        def _save(self):
            super()._save()
            self.look()

        def look(self):
            seen.append([tensor.numpy() for pair in self.state.carried for tensor in pair])

    monkeypatch.setattr("tfwd.lm.trainer.Trainer", Watched)
    with pytest.raises(Stopped) as stopped:
        train(config, str(tmp_path), StopAfter(looks))
    assert stopped.value.exit_code == 143
    (step,) = Checkpoints(tmp_path / "checkpoints").steps()
    progress = Checkpoints(tmp_path / "checkpoints").progress(step)
    assert progress["epoch"] == 0 and progress["window"] == step
    steps = next(r["step"] for r in log(finished) if r["kind"] == "valid")
    assert step == min(looks + 1, steps) and (looks < steps or "valid" not in log(tmp_path))
    left = len(seen)
    again = train(config, str(tmp_path), StopRequest())
    for before, after in zip(seen[left - 1], seen[left], strict=True):
        assert before.any()
        np.testing.assert_array_equal(before, after)
    assert f"resuming from the checkpoint of step {step}" in capsys.readouterr().out
    assert again["texts"]["test"]["nats"] == pytest.approx(
        summary["texts"]["test"]["nats"], abs=1e-4
    )
    assert [r["step"] for r in log(tmp_path)] == [r["step"] for r in log(finished)]


def copy(whole, tmp_path):
    return Path(shutil.copytree(whole[1], tmp_path / "run"))


@extended
@once
def test_a_stop_in_the_last_evaluation_costs_only_that(whole, text, tmp_path):
    workdir = copy(whole, tmp_path)
    (workdir / "report" / "summary.json").unlink()
    with pytest.raises(Stopped):
        train(make_config(text), str(workdir), StopAfter(1))
    assert not (workdir / "report" / "summary.json").exists()
    assert train(make_config(text), str(workdir), StopRequest()) == whole[0]


@extended
def test_a_finished_run_may_be_given_more_epochs(whole, text, tmp_path):
    workdir = copy(whole, tmp_path)
    summary = train(make_config(text, training__epochs=3), str(workdir), StopRequest())
    assert summary["epochs"] == 3
    assert log(workdir)[: len(log(whole[1]))] == log(whole[1])
    assert json.loads((workdir / "config.json").read_text())["training"]["epochs"] == 3


def test_another_configuration_is_refused(whole, text, tmp_path):
    workdir = copy(whole, tmp_path)
    before = (workdir / "config.json").read_bytes()
    config = make_config(text, model__weight_dropout=0.25, optimizer__learning_rate=0.5)
    with pytest.raises(UserError) as error:
        train(config, str(workdir), StopRequest())
    assert "model.weight_dropout is 0.5 in the folder and 0.25 now" in str(error.value)
    assert "optimizer.learning_rate is 0.01 in the folder and 0.5 now" in str(error.value)
    assert (workdir / "config.json").read_bytes() == before


def test_another_text_is_refused(whole, text, tmp_path):
    workdir = copy(whole, tmp_path)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("one", "eleven"))
    with pytest.raises(UserError, match="another vocabulary"):
        train(make_config(other), str(workdir), StopRequest())
    lines = text.read_text().splitlines()
    other.write_text("\n".join([*lines[:-2], *lines[:-3:-1]]) + "\n")
    with pytest.raises(UserError, match=r"the data is not the data"):
        train(make_config(other), str(workdir), StopRequest())
    moved = shutil.copy(text, tmp_path / "moved.txt")
    assert train(make_config(moved), str(workdir), StopRequest()) == whole[0]


@pytest.mark.slow
@once
def test_a_report_that_is_damaged_is_made_again(whole, text, tmp_path, capsys):
    workdir = copy(whole, tmp_path)
    summary = workdir / "report" / "summary.json"
    for damaged in (summary.read_bytes()[:50], b'{"step": %d}' % whole[0]["step"]):
        summary.write_bytes(damaged)
        assert train(make_config(text), str(workdir), StopRequest()) == whole[0]
        assert "summary.json is no" in (said := capsys.readouterr().out)
        assert "the summary is made again" in said
        assert json.loads(summary.read_text()) == whole[0]
    summary.unlink()
    (workdir / "metrics.jsonl").write_bytes(b'{"kind": "valid", "st')
    assert train(make_config(text), str(workdir), StopRequest()) == whole[0]
    assert "metrics.jsonl has 0 of its" in capsys.readouterr().out


def test_broken_best_weights_are_said(whole, text, tmp_path):
    workdir = copy(whole, tmp_path)
    (workdir / "report" / "summary.json").unlink()
    for index in (workdir / "best").glob("*/tensors.index"):
        index.write_bytes(b"")
    with pytest.raises(UserError, match=r"the best weights, .*tensors.index has 0 of"):
        train(make_config(text), str(workdir), StopRequest())


@once
def test_early_stopping_and_decay(text, tmp_path):
    config = make_config(
        text,
        training__epochs=9,
        training__patience=2,
        training__lr_decay_factor=0.5,
        training__min_learning_rate=0.3,
        optimizer__learning_rate=1.0,
    )
    summary = train(config, str(tmp_path), StopRequest())
    valid = [r for r in log(tmp_path) if r["kind"] == "valid"]
    losses = [r["loss"] for r in valid]
    assert len(losses) < 9 and summary["epochs"] == len(losses)
    assert summary["best_epoch"] == int(np.argmin(losses)) + 1 == len(losses) - 2
    rate = 1.0
    for number, record in enumerate(valid):
        assert record["learning_rate"] == pytest.approx(rate)
        assert record["best"] == (record["loss"] == min(losses[: number + 1]))
        if not record["best"]:
            rate = max(rate / 2, 0.3)


def test_one_process_at_a_time(text, tmp_path):
    config = make_config(text)
    vocabulary = Vocabulary.from_tokens(WORDS.tolist(), "word")
    folder = RunFolder(tmp_path, PROGRAM)
    folder.open(config, vocabulary)
    with pytest.raises(UserError, match="another process is training"):
        RunFolder(tmp_path, PROGRAM).open(config, vocabulary)
    folder.close()
    again = RunFolder(tmp_path, PROGRAM)
    again.open(config, vocabulary)
    again.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__batch_size": 5000}, "the training text has .* largest batch size"),
        ({"data__eval_batch_size": 500}, "the valid text has .* largest batch size"),
        ({"data__path": "no/such/text"}, "no/such/text"),
        (
            {"optimizer__kwargs": {"epsilon": "much"}},
            "optimizer.kwargs of adam, .*much.*give other",
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_half_done(text, tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as error:
        train(make_config(text, **changes), str(tmp_path / "run"), StopRequest())
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_workdir_that_cannot_be_written(text, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the workdir .*file/run"):
        train(make_config(text), str(tmp_path / "file" / "run"), StopRequest())


def test_no_workdir_given(capsys, root):
    with pytest.raises(SystemExit) as ended:
        config = f"--config={root / 'configs' / 'quickstart.py'}"
        command_runner.run(main, define, "", schema=PROGRAM.schema, argv=["tfwd-train", config])
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "error: --workdir is missing; give a folder for the run, such as "
        "--workdir=runs/quickstart\n"
    )


@extended
@once
def test_checkpoints_by_steps_and_how_many_are_kept(text, tmp_path):
    config = make_config(
        text, training__epochs=1, training__checkpoint_steps=4, training__keep_checkpoints=3
    )
    summary = train(config, str(tmp_path), StopRequest())
    last = summary["step"]
    expected = [*range(4, last, 4), last][-3:]
    assert Checkpoints(tmp_path / "checkpoints").steps() == expected
    assert Checkpoints(tmp_path / "best").steps() == [last]
    assert not tf.io.gfile.glob(str(tmp_path / "checkpoints" / ".writing*"))
