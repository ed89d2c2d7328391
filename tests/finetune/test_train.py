"""Whole runs on a toy task: learning, files, and stops that change nothing."""

import numpy as np
import pytest
from finetune_tools import LEARNT, log, make_config, summary
from safetensors.numpy import load_file
from stack_marks import SLOW_ON_KERAS_2, extended, rest
from training_loop_runs import StopAfter

from tfwd.finetune import program
from tfwd.finetune.program import PROGRAM
from tfwd.layers._substitution.reference_weights import variables
from tfwd.runs.errors import UserError
from tfwd.runs.training import several_seeds, train_command
from tfwd.runs.training.stop_signals import Stopped, StopRequest
from tfwd.runs.training.weight_norms import norms

pytestmark = SLOW_ON_KERAS_2


def run(config, workdir, stop=None):
    return train_command.train(
        PROGRAM, config, str(workdir), StopRequest() if stop is None else stop
    )


def test_a_separable_task_is_learnt(learnt):
    found = summary(learnt)
    for part in ("train", "valid", "test"):
        scores = found["texts"][part]
        assert scores["accuracy"] == scores["macro_f1"] == 1.0
        assert scores["loss"] < 0.1 and scores["majority"] == 0.5
    assert found["classes"] == ["neg", "pos"] and found["confusion"] == [[4, 0], [0, 4]]
    valid = [record for record in log(learnt) if record["kind"] == "valid"]
    assert valid[0]["accuracy"] < 1 and valid[-1]["accuracy"] == 1
    assert valid[-1]["train_loss"] < valid[0]["train_loss"] / 3
    for name in ("curves.png", "confusion.png"):
        assert (learnt / "report" / name).read_bytes().startswith(b"\x89PNG")
    assert list((learnt / "tensorboard").glob("events.*"))
    examples = (learnt / "report" / "examples.txt").read_text().splitlines()
    assert len(examples) == 5 and "(true label:" not in "".join(examples)


def test_a_finished_run_is_shown_again(learnt, data, pretrained, capsys):
    before = (learnt / "report" / "summary.json").read_bytes()
    config = make_config(data, pretrained, **LEARNT)
    run(config, learnt)
    out = capsys.readouterr().out
    assert "is finished; this is its report" in out and "100.00%" in out
    assert (learnt / "report" / "summary.json").read_bytes() == before


EVERYTHING = {
    "model__dropout": 0.1,
    "model__attention_dropout": 0.1,
    "model__head_dropout": 0.1,
    "model__mixout": 0.3,
    "model__noise": 0.1,
    "model__noise_scale": "deviation",
    "model__pooling": "pooler",
    "model__reinitialize_layers": 1,
    "model__freeze_embeddings": True,
    "optimizer__weight_decay": 0.01,
    "optimizer__decay_towards": "start",
    "optimizer__layer_decay": 0.8,
}


@pytest.fixture
def whole(request, data, pretrained, tmp_path):
    """Returns the changes to a config, and the folder of a run with it that was never stopped."""
    if request.param == "learnt":
        return LEARNT, request.getfixturevalue("learnt")
    run(make_config(data, pretrained, **EVERYTHING), tmp_path / "whole")
    return EVERYTHING, tmp_path / "whole"


@pytest.mark.parametrize("whole", ["learnt", pytest.param("everything", marks=rest)], indirect=True)
def test_a_stopped_run_resumes_with_the_same_results(whole, data, pretrained, tmp_path):
    changes, undisturbed = whole
    config = make_config(data, pretrained, **changes)
    with pytest.raises(Stopped):
        run(config, tmp_path / "again", StopAfter(2))  # within the first epoch
    assert run(config, tmp_path / "again")["step"] == 4 * config.training.epochs
    assert log(tmp_path / "again") == log(undisturbed)
    assert summary(tmp_path / "again") == summary(undisturbed)
    for checkpoint in ("best", "last"):
        one, other = (
            PROGRAM.named_weights(program.load(folder, checkpoint).model)
            for folder in (undisturbed, tmp_path / "again")
        )
        assert list(one) == list(other)
        for name in one:
            np.testing.assert_array_equal(one[name].numpy(), other[name].numpy(), err_msg=name)


@extended
def test_weights_are_held_to_the_pretrained_ones(data, pretrained, tmp_path):
    """Checks the weights with almost no learning rate, and a decay that undoes most changes."""
    held = {"optimizer__weight_decay": 0.9, "optimizer__decay_scale": "absolute"}
    held |= {"optimizer__decay_towards": "start", "optimizer__decay_include": "stack/.*kernel"}
    changes = {**held, "model__mixout": 0.5, "optimizer__learning_rate": 1e-4}
    run(make_config(data, pretrained, **changes, training__epochs=1), tmp_path / "run")
    loaded = program.load(tmp_path / "run", "last").model
    published = load_file(pretrained / "model.safetensors")
    query = "encoder.layer.1.attention.self.query.weight"
    (kernel,) = (
        v.numpy()
        for k, v in PROGRAM.named_weights(loaded).items()
        if "1/attention/q" in k and k.endswith("kernel")
    )
    (there,) = (v.T for k, v in published.items() if k.endswith(query))
    # Of each earlier step of Adam, at most the rate, a tenth is left at each later one.
    assert 0 < np.abs(kernel - there).max() < 2e-4
    references = [v.numpy() for v in variables(loaded) if v.shape == there.shape]
    assert any((reference == there).all() for reference in references)


def test_several_seeds(data, pretrained, tmp_path, capsys, monkeypatch):
    config = make_config(data, pretrained, training__epochs=1)
    found = iter([(0.5, 0.5), (0.75, 0.5), (1.0, 0.5)])

    def made(program, own, workdir, stop, workers):
        accuracy, majority = next(found)
        scores = {"accuracy": accuracy, "macro_f1": 0.5, "loss": None, "majority": majority}
        return {"texts": {"valid": scores, "test": {**scores, "loss": float(own.seed)}}}

    from tfwd.finetune.commands.train import numbers_to_compare

    monkeypatch.setattr(train_command, "train", made)
    outcomes = several_seeds.train(
        PROGRAM, config, str(tmp_path / "many"), 3, StopRequest(), numbers_to_compare
    )
    assert [outcome.seed for outcome in outcomes] == [0, 1, 2] and config.seed == 0
    assert [bool(outcome.failed) for outcome in outcomes] == [True, False, False]
    of_all = several_seeds.compare(outcomes)
    assert of_all["valid accuracy"] == {"mean": 0.75, "spread": 0.25, "least": 0.5, "most": 1.0}
    assert of_all["test loss"]["mean"] == 1.0 and "valid loss" not in of_all
    out = capsys.readouterr().out
    assert "1 of 3 runs failed: seed 0" in out and "mean" in out and "0.7500" in out
    assert (tmp_path / "many" / "seeds.json").exists()


@rest
def test_several_seeds_in_truth(data, pretrained, tmp_path, capsys):
    config = make_config(data, pretrained, training__epochs=1)
    from tfwd.finetune.commands.train import numbers_to_compare

    workdir = str(tmp_path / "two")
    outcomes = several_seeds.train(PROGRAM, config, workdir, 2, StopRequest(), numbers_to_compare)
    assert outcomes[0].numbers != outcomes[1].numbers
    assert summary(tmp_path / "two" / "seed-1") != summary(tmp_path / "two" / "seed-0")
    capsys.readouterr()
    assert (
        several_seeds.train(PROGRAM, config, workdir, 2, StopRequest(), numbers_to_compare)
        == outcomes
    )
    assert capsys.readouterr().out.count("is finished; this is its report") == 2
    with pytest.raises(UserError, match="holds a single run"):
        several_seeds.train(
            PROGRAM, config, f"{workdir}/seed-0", 2, StopRequest(), numbers_to_compare
        )


@rest
def test_a_run_that_is_not_finite_ends_in_one_line(data, pretrained, tmp_path):
    config = make_config(data, pretrained, optimizer__learning_rate=1e38, optimizer__name="sgd")
    config.optimizer.clip_norm = 0.0
    with pytest.raises(UserError, match="diverged at step"):
        run(config, tmp_path / "run")


def test_norms_have_the_frozen_parts_not(data, pretrained, tmp_path):
    from tfwd.finetune.model import make_model

    corpus = PROGRAM.read_data(make_config(data, pretrained))
    config = make_config(data, pretrained, model__freeze_embeddings=True, model__freeze_layers=1)
    model = make_model(config, corpus.vocabulary)
    trained = " ".join(norms(model))
    assert "layer_1/output/kernel" in trained and "head" in trained
    assert "layer_0" not in trained and "embeddings" not in trained
    config.model.freeze_layers = 3
    with pytest.raises(UserError, match=r"model\.freeze_layers=3: the encoder has 2 layers"):
        make_model(config, corpus.vocabulary)


@rest
def test_half_precision(data, pretrained, tmp_path):
    config = make_config(data, pretrained, training__epochs=12)
    config.model.dtype_policy = "mixed_float16"
    config.optimizer.layer_decay = 0.9
    found = run(config, tmp_path / "run")["texts"]["train"]
    assert found["accuracy"] > 0.9 and found["loss"] < 0.5
