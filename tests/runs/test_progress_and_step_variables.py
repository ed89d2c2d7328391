"""Progress of a run, the variables of a step, and the fingerprint of data."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf

from tfwd.runs.errors import UserError
from tfwd.runs.storage.data_fingerprint import fingerprint
from tfwd.runs.storage.progress import Progress
from tfwd.runs.training.step_variables import StepVariables


def test_progress_survives_json():
    progress = Progress(step=7, data="abc")
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress
    progress.end_epoch(1 / 3)
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress
    with pytest.raises(UserError, match="another version of tfwd .*extra"):
        Progress.from_json({**progress.to_json(), "extra": 1})


def test_best_and_patience():
    progress = Progress()
    found = []
    for step, loss in enumerate([5.0, 4.0, 4.0, math.nan, 4.5], 1):
        progress.step, progress.window = step * 10, 9
        assert not progress.finished(epochs=10, patience=3)
        found.append(progress.end_epoch(loss))
        assert progress.window == 0
    assert found == [True, True, False, False, False]
    assert (progress.best_epoch, progress.best_step, progress.best_loss) == (2, 20, 4.0)
    assert progress.finished(epochs=10, patience=3)
    assert not progress.finished(epochs=10, patience=4)
    assert not progress.finished(epochs=10)
    assert progress.finished(epochs=5)


def test_plateau_counts_from_zero_after_a_decay():
    progress = Progress()
    falls = []
    for loss in [5.0, 6.0, 6.0, 6.0, 6.0, 4.0, 6.0]:
        progress.end_epoch(loss)
        falls.append(progress.reduces_learning_rate(0.5, 2))
    assert falls == [False, False, True, False, True, False, False]
    progress.plateau_epochs = 99
    assert not progress.reduces_learning_rate(1.0, 2)


def test_step_variables_are_whole_in_a_checkpoint(tmp_path):
    def make():
        return StepVariables([[tf.zeros([2, 3]), tf.zeros([2, 3], tf.float16)]], learning_rate=0.5)

    state, other = make(), make()
    for number, variable in enumerate(state.variables):
        variable.assign(tf.fill(variable.shape, tf.cast(number + 1, variable.dtype)))
    tf.train.Checkpoint(state=state).write(str(tmp_path / "state"))
    tf.train.Checkpoint(state=other).read(str(tmp_path / "state")).assert_consumed()
    assert len(other.variables) == 9
    for variable, same in zip(state.variables, other.variables, strict=True):
        np.testing.assert_array_equal(variable, same)
    assert not state.trainable_variables


def test_fingerprint_tells_texts_apart():
    texts = {"train": np.arange(5), "valid": np.arange(3)}
    same = {"valid": np.arange(3, dtype=np.int32), "train": np.arange(5, dtype=np.int32)}
    assert fingerprint(texts) == fingerprint(same)
    assert fingerprint(texts) != fingerprint({**texts, "valid": np.arange(4)})
    assert fingerprint(texts) != fingerprint({"train": np.arange(3), "valid": np.arange(5)})
