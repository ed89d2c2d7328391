"""tfwd-train with diverging training: messages, skipped steps, and returns to a checkpoint."""

import re

import numpy as np
import pytest
import tensorflow as tf
from stack_marks import SLOW_ON_KERAS_2, once
from training_loop_runs import log, make_config

from tfwd.lm import training_step
from tfwd.lm.commands.train import train
from tfwd.lm.data.splits_and_tokens import load_splits, tokenize
from tfwd.lm.data.vocabulary import Vocabulary
from tfwd.lm.trainer import Trainer
from tfwd.runs.errors import UserError
from tfwd.runs.storage.checkpoint import Checkpoints
from tfwd.runs.training.non_finite_steps import Diverged
from tfwd.runs.training.stop_signals import StopRequest

pytestmark = SLOW_ON_KERAS_2


@pytest.mark.slow
@once
def test_a_loss_that_is_not_finite(text, tmp_path):
    config = make_config(
        text,
        optimizer__name="sgd",
        optimizer__learning_rate=1e30,
        optimizer__clip_norm=0.0,
        data__random_windows=False,
    )
    with pytest.raises(UserError) as error:
        train(config, str(tmp_path), StopRequest())
    message = str(error.value)
    assert "\n" not in message
    failure = log(tmp_path)[-1]
    # It depends on the processor's rounding whether a weight or a layer overflows first, and which.
    first = (
        r"(weight language_model/\S+: its norm is not|layer \w+: layer '\w+': forward output has)"
    )
    assert re.search(f"diverged at step {failure['step']} in {first}", message)
    for part in (
        "loss ",
        "gradient norm",
        "learning rate 1e+30",
        "or clipping (optimizer.clip_norm is 0: off) may help",
        "no checkpoint",
        f"the report is in {tmp_path}/report/non_finite.txt",
    ):
        assert part in message
    report = (tmp_path / "report" / "non_finite.txt").read_text()
    for name in ("embeddings", "recurrent_kernel", "decoder/bias"):
        assert re.search(rf"(inf|NaN)  language_model/.*{name}\n", report)
    assert failure["kind"] == "failure" and failure["norms"]


@pytest.fixture
def nan_in_sixth_window(text, monkeypatch):
    """Plants a NaN in the loss of an epoch's sixth window while `armed` is true.

    The window is recognized by its first two targets, which no other window has.
    """
    config = make_config(text, data__random_windows=False)
    tokens = tokenize(load_splits(str(text)).train, "word")
    ids = Vocabulary.from_tokens(tokens, "word", config.data.min_count).encode(tokens)
    columns = ids[: len(ids) // 4 * 4].reshape(4, -1)
    own, armed = training_step.token_nats, tf.Variable(True)
    marks = columns[:, 10 * 5 + 1]
    firsts = columns[:, 1::10]
    assert [n for n, each in enumerate(firsts.T) if (each == marks).all()] == [5]

    def nats(logits, targets):
        bad = armed & tf.reduce_all(targets[:, 0] == marks)
        return own(logits, targets) * tf.where(bad, np.nan, 1.0)

    monkeypatch.setattr(training_step, "token_nats", nats)
    return armed


def run(text, folder, check, **changes):
    config = make_config(text, data__random_windows=False, numerics__check=check, **changes)
    summary = train(config, str(folder), StopRequest())
    records = log(folder)
    failures = [r["step"] for r in records if r["kind"] == "failure"]
    return summary, [r for r in records if r["kind"] == "valid"], failures


@once
def test_a_step_that_is_not_finite_ends_the_run(nan_in_sixth_window, text, tmp_path):
    with pytest.raises(Diverged) as error:
        run(text, tmp_path, "raise")
    assert error.value.short == "diverged at step 6 in the loss"
    assert "no checkpoint yet" in str(error.value)
    report = (tmp_path / "report" / "non_finite.txt").read_text()
    assert report.startswith("loss: NaN, step 6\n")
    assert "Likely cause: the loss function." in report


@pytest.mark.slow
def test_a_step_that_is_left_out(nan_in_sixth_window, text, tmp_path, capsys):
    summary, valid, failures = run(text, tmp_path, "skip")
    each = valid[0]["step"]
    assert failures == [6, 6 + each] and summary["step"] == 2 * each
    assert np.isfinite(summary["texts"]["valid"]["nats"])
    assert "loss: NaN, step 6: the step is skipped" in capsys.readouterr().out


@pytest.mark.slow
@once
def test_going_back_an_epoch(nan_in_sixth_window, text, tmp_path, capsys):
    with pytest.raises(
        Diverged,
        match="no epoch of this run has ended with finite weights, so no state can be restored",
    ):
        run(text, tmp_path / "first", "restore")
    nan_in_sixth_window.assign(False)
    whole, own_tell = Trainer._end_epoch, Trainer._report_failure
    models, at_the_end, gone_back = [], [], []

    def weights():
        return [weight.numpy() for weight in models[-1].trainable_variables]

    def then_arm(self, title):
        whole(self, title)
        nan_in_sixth_window.assign(True)
        models.append(self.model)
        at_the_end.append(weights())

    def tell(self, *given):
        own_tell(self, *given)
        gone_back.append(weights())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_end_epoch", then_arm)
        patch.setattr(Trainer, "_report_failure", tell)
        summary, valid, failures = run(text, tmp_path / "second", "restore")
    for found, wanted in zip(gone_back[0], at_the_end[0], strict=True):
        np.testing.assert_array_equal(found, wanted)
    each = valid[0]["step"]
    assert failures == [6 + each] and summary["step"] == 2 * each
    assert [r["learning_rate"] for r in valid] == pytest.approx([0.01, 0.005])
    assert "restored the end of the last epoch with finite weights, at learning rate 0.005" in (
        capsys.readouterr().out
    )


@pytest.mark.slow
@once
def test_too_many_steps_in_a_row(text, tmp_path, monkeypatch):
    own = training_step.token_nats
    monkeypatch.setattr(training_step, "token_nats", lambda *given: own(*given) * np.nan)
    with pytest.raises(Diverged, match="before this step, 5 consecutive bad steps were") as error:
        run(text, tmp_path, "skip")
    assert error.value.short == "diverged at step 6 in the loss"


@pytest.mark.slow
@once
def test_without_checks_nothing_is_reported(text, tmp_path, monkeypatch):
    own = training_step.token_nats
    monkeypatch.setattr(training_step, "token_nats", lambda *given: own(*given) * np.nan)
    _, valid, failures = run(text, tmp_path, "off", training__epochs=1)
    assert failures == [] and valid[0]["train_loss"] is None


@once
@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "step", "kept"), [pytest.param(2, 4, 2, marks=pytest.mark.slow), (3, 5, 3)]
)
def test_a_weight_that_is_not_finite_is_never_saved(text, tmp_path, monkeypatch, every, step, kept):
    """Checks a weight that turns infinite after step 4: no checkpoint may hold it."""

    def spoil(self, lengths):
        if self.progress.step == 4:
            self.model.decoder.bias.assign(np.full(self.model.vocabulary_size, np.inf))

    monkeypatch.setattr(Trainer, "_show_progress", spoil)
    config = make_config(text, training__checkpoint_steps=every)
    with pytest.raises(
        UserError, match=rf"step {step} in weight .*decoder/bias: .*step {kept} is kept"
    ):
        train(config, str(tmp_path), StopRequest())
    assert Checkpoints(tmp_path / "checkpoints").steps() == [kept]
