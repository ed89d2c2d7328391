"""Tokens and their numbers."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfwd.lm.data.vocabulary import Vocabulary
from tfwd.runs.errors import UserError

TOKENS = st.lists(st.sampled_from(["a", "b", "c", "d", "<unk>", "<eos>", "é", "x y"]), min_size=1)


@given(tokens=TOKENS, min_count=st.integers(1, 3))
def test_counts_and_order(tokens, min_count):
    counts = Counter(tokens)
    expected = [
        token
        for token in sorted(counts, key=lambda token: (-counts[token], tokens.index(token)))
        if counts[token] >= min_count and token not in ("<unk>", "<eos>")
    ]
    if not expected:
        with pytest.raises(UserError, match=rf"min_count={min_count}"):
            Vocabulary.from_tokens(tokens, "word", min_count)
        return
    vocabulary = Vocabulary.from_tokens(tokens, "word", min_count)
    assert vocabulary.tokens == ["<unk>", "<eos>", *expected]
    assert len(vocabulary) == len(expected) + 2
    assert (vocabulary.unk_id, vocabulary.eos_id) == (0, 1)
    ids = vocabulary.encode(tokens)
    assert ids.dtype == np.int32
    kept = {*expected, "<eos>"}
    assert vocabulary.decode(ids) == [t if t in kept else "<unk>" for t in tokens]


def test_characters():
    vocabulary = Vocabulary.from_tokens(list("<unk> to be"), "char")
    assert vocabulary.tokens[0] == "<unk>"
    assert set(vocabulary.tokens[1:]) == set("<unk> to be")  # characters, not the symbol
    assert vocabulary.eos_id is None
    assert vocabulary.encode(["b", "?", " "]).tolist()[1] == vocabulary.unk_id == 0


def test_decode_refuses_other_numbers():
    vocabulary = Vocabulary.from_tokens(["a"], "word")
    for wrong in (-1, 3):
        expected = f"no token has the id {wrong}: give an id from 0 to 2"
        with pytest.raises(ValueError, match=expected):
            vocabulary.decode([0, wrong])


def test_constructor_refuses_a_broken_list():
    with pytest.raises(ValueError, match="'a' is in the vocabulary more than once"):
        Vocabulary(["<unk>", "<eos>", "a", "a"])
    with pytest.raises(ValueError, match="begins with"):
        Vocabulary(["a", "b", "<unk>", "<eos>"])


def test_fingerprint_depends_on_everything():
    tokens = ["b", "a", "b", "c"]
    prints = {
        Vocabulary.from_tokens(tokens, "word").fingerprint(),
        Vocabulary.from_tokens(tokens, "char").fingerprint(),
        Vocabulary.from_tokens(tokens[1:], "word").fingerprint(),  # another order
        Vocabulary.from_tokens(tokens[:3], "word").fingerprint(),
    }
    assert len(prints) == 4
    assert Vocabulary.from_tokens(list(tokens), "word").fingerprint() in prints
    assert all(len(value) == 16 and int(value, 16) >= 0 for value in prints)


@given(tokens=st.lists(st.characters(), min_size=1))
def test_save_and_load(tmp_path_factory, tokens):
    file = tmp_path_factory.mktemp("vocabulary") / "vocabulary.json"
    vocabulary = Vocabulary.from_tokens(tokens, "char")
    vocabulary.save(file)
    loaded = Vocabulary.load(file)
    assert (loaded.tokens, loaded.level) == (vocabulary.tokens, "char")
    assert loaded.fingerprint() == vocabulary.fingerprint()


def test_load_refuses_an_incomplete_file(tmp_path):
    file = tmp_path / "vocabulary.json"
    with pytest.raises(UserError, match=r"cannot read the vocabulary .*No such file"):
        Vocabulary.load(file)
    Vocabulary.from_tokens(["a", "b"], "word").save(file)
    whole = file.read_text()
    wrong = [
        whole[: len(whole) // 2],
        json.dumps({"level": "word"}),
        json.dumps(["a"]),
        json.dumps({"level": "word", "tokens": ["a"]}),
        json.dumps({"level": "sentence", "tokens": ["<unk>", "<eos>", "a"]}),
    ]
    for content in wrong:
        file.write_text(content)
        with pytest.raises(UserError, match="is not a complete vocabulary"):
            Vocabulary.load(file)


def test_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    file = tmp_path / "vocabulary.json"
    Vocabulary.from_tokens(["old"], "word").save(file)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*vocabulary\.json: No space left"):
        Vocabulary.from_tokens(["new"], "word").save(file)
    assert Vocabulary.load(file).tokens[-1] == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["vocabulary.json"]  # nothing left over
    with pytest.raises(UserError, match="cannot write"):
        Vocabulary.from_tokens(["new"], "word").save(tmp_path / "missing" / "vocabulary.json")
