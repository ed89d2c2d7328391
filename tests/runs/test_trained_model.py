"""Reading a model from its run's folder, whole or damaged."""

import numpy as np
import pytest
from stack_marks import quick_rows

from tfwd.lm.data.vocabulary import Vocabulary
from tfwd.lm.model import make_model
from tfwd.lm.program import load
from tfwd.runs.errors import UserError
from tfwd.runs.storage.trained_model import CHECKPOINTS


def cut(folder, step):
    """Shortens a checkpoint's largest file, as a full disk or a broken copy does."""
    files = (folder / f"step-{step:08d}").iterdir()
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-10])


def everything(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@quick_rows("best")
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_newest_of_either_kind(make_run, checkpoint):
    run = make_run()
    before = everything(run)
    found = load(run, checkpoint)
    assert found.progress["step"] == 20
    assert len(found.vocabulary) == found.model.vocabulary_size
    fresh = make_model(found.config, len(found.vocabulary))
    for first, now in zip(fresh.get_weights(), found.model.get_weights(), strict=True):
        np.testing.assert_allclose(now, first * 1.5**2, rtol=1e-6)
    assert everything(run) == before


def test_damaged_checkpoint_is_passed_over_and_said_so(make_run, capsys):
    run = make_run()
    cut(run / "best", 20)
    before = everything(run)
    found = load(run)
    assert found.progress["step"] == 10
    said = capsys.readouterr().err
    assert "step-00000020" in said and "bytes" in said and "previous checkpoint" in said
    assert len(said.splitlines()) == 1
    assert everything(run) == before  # reading a run changes nothing in it


def test_no_whole_checkpoint_is_left(make_run):
    run = make_run()
    cut(run / "best", 10)
    cut(run / "best", 20)
    with pytest.raises(UserError, match="no complete checkpoint is left"):
        load(run)
    assert load(run, "last").progress["step"] == 20


def test_errors_of_incomplete_runs(make_run, tmp_path):
    with pytest.raises(UserError, match=r"there is no run in .*nothing: it has no config\.json"):
        load(tmp_path / "nothing")
    run = make_run(best=False)
    with pytest.raises(UserError, match="has no best checkpoint yet; try --checkpoint=last"):
        load(run)
    with pytest.raises(UserError, match="--checkpoint=first: give best or last"):
        load(run, "first")
    (run / "vocabulary.json").unlink()
    with pytest.raises(UserError, match="cannot read the vocabulary"):
        load(run)


def test_another_vocabulary_or_shape(make_run):
    run = make_run()
    config = (run / "config.json").read_text()
    (run / "config.json").write_text(config.replace("      5,\n", "      9,\n"))
    with pytest.raises(UserError, match="of another model"):
        load(run)
    (run / "config.json").write_text(config)
    Vocabulary.from_tokens(["few", "words"], "word").save(run / "vocabulary.json")
    with pytest.raises(UserError, match="of another model"):
        load(run)
    Vocabulary.from_tokens(["a", "b"], "char").save(run / "vocabulary.json")
    expected = "belongs to another run: its level is char, and the run's level is word"
    with pytest.raises(UserError, match=expected):
        load(run)


def test_another_vocabulary_of_the_same_size_is_refused(make_run):
    path = make_run()
    vocabulary = Vocabulary.load(path / "vocabulary.json")
    text = (path / "vocabulary.json").read_text()
    first, second = (f'"{token}"' for token in vocabulary.tokens[-2:])
    text = text.replace(first, "\0").replace(second, first).replace("\0", second)
    (path / "vocabulary.json").write_text(text)
    with pytest.raises(UserError, match="not the vocabulary that the best checkpoint"):
        load(path)
