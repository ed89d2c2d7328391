"""The optimizer in tfwd-train: averages, decay, and weights without a gradient."""

import numpy as np
import pytest
from stack_marks import IS_KERAS_2, SLOW_ON_KERAS_2, extended, once
from training_loop_runs import StopAfter, log, make_config, model_options

from tfwd.lm.commands.train import train
from tfwd.lm.data.vocabulary import Vocabulary
from tfwd.lm.model import LanguageModel
from tfwd.lm.trainer import Trainer
from tfwd.optimizers import NonMonotonicASGD
from tfwd.runs.errors import UserError
from tfwd.runs.storage.checkpoint import Checkpoints
from tfwd.runs.training.stop_signals import Stopped, StopRequest

pytestmark = SLOW_ON_KERAS_2


@pytest.mark.slow
@once
def test_averages_are_evaluated_and_saved_and_training_resumes_from_raw_weights(
    text, tmp_path, monkeypatch
):
    """Checks that a run stopped after the trigger ends as if it had not been stopped."""
    changes = {
        "optimizer__name": "sgd",
        "optimizer__learning_rate": 3.0,
        "optimizer__weight_decay": 0.01,
        "optimizer__decay_exclude": "bias",
        "optimizer__non_monotone_interval": 1,
        "training__epochs": 6,
    }
    losses = iter([1.0, 1.0, 2.0])  # triggered after the third epoch, whatever was learned
    observe = NonMonotonicASGD.observe
    monkeypatch.setattr(NonMonotonicASGD, "observe", lambda self, v: observe(self, next(losses, v)))
    seen = {}
    save = Trainer._save

    def look(self):
        seen[self.progress.step] = [w.copy() for w in self.model.get_weights()]
        save(self)

    monkeypatch.setattr(Trainer, "_save", look)
    whole = train(make_config(text, **changes), str(tmp_path / "whole"), StopRequest())
    valid = [r for r in log(tmp_path / "whole") if r["kind"] == "valid"]
    assert [r["averaged"] for r in valid] == [False] * 3 + [True] * 3
    best = Checkpoints(tmp_path / "whole" / "best")
    assert whole["best_epoch"] > 3, "the averages are better than the weights at such a rate"
    vocabulary = Vocabulary.load(tmp_path / "whole" / "vocabulary.json")
    model = LanguageModel(len(vocabulary), **model_options(text))
    best.read(best.steps()[-1], {"model": model})
    assert not np.array_equal(model.get_weights()[1], seen[best.steps()[-1]][1])

    losses = iter([1.0, 1.0, 2.0])
    config, steps = make_config(text, **changes), whole["step"] // 6
    with pytest.raises(Stopped):
        train(config, str(tmp_path / "part"), StopAfter(5 * steps))
    again = train(config, str(tmp_path / "part"), StopRequest())
    assert log(tmp_path / "part") == log(tmp_path / "whole")
    assert again["texts"] == whole["texts"]


@extended
def test_decayed_weights_are_shown_at_the_start(text, tmp_path, capsys):
    config = make_config(
        text,
        optimizer__weight_decay=0.5,
        optimizer__decay_multipliers="embeddings=0.25",
        optimizer__decay_exclude="bias",
        training__epochs=1,
    )
    train(config, str(tmp_path), StopRequest())
    shown = capsys.readouterr().out
    assert shown.count("decay per update") == 1
    assert "multiplier 0.25 from 'embeddings'" in shown and "exclude 'bias'" in shown
    assert "no gradient reaches" not in shown


def test_a_pattern_that_matches_no_weight(text, tmp_path):
    config = make_config(text, optimizer__weight_decay=0.5, optimizer__decay_include="kernels")
    words = "optimizer.decay_include pattern 'kernels' matches no variable; the paths are: .*kernel"
    with pytest.raises(UserError, match=words):
        train(config, str(tmp_path), StopRequest())


class WithPooler(LanguageModel):
    """A model with a weight that its output does not depend on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not IS_KERAS_2:
            self._tracker.unlock()  # the model is built when it is made
        self.pooler = self.add_weight(shape=(3,), name="pooler", initializer="ones")


@extended
@pytest.mark.parametrize("asked", [pytest.param(False, marks=pytest.mark.slow), True])
def test_unused_weights_are_listed_once(text, tmp_path, capsys, monkeypatch, asked):
    monkeypatch.setattr("tfwd.lm.model.LanguageModel", WithPooler)
    config = make_config(
        text,
        optimizer__weight_decay=0.5,
        optimizer__decay_unused=asked,
        training__epochs=1,
    )
    summary = train(config, str(tmp_path), StopRequest())
    assert capsys.readouterr().out.count("no gradient reaches these weights") == 1
    vocabulary = Vocabulary.load(tmp_path / "vocabulary.json")
    model = WithPooler(len(vocabulary), **model_options(text))
    Checkpoints(tmp_path / "checkpoints").restore({"model": model})
    left = model.pooler.numpy()
    assert (left < 1).all() if asked else (left == 1).all()
    assert summary["step"] > 3
