"""Reading a text in three parts, and cutting it into tokens."""

import os
import platform

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfwd.lm.data import splits_and_tokens
from tfwd.runs.errors import UserError

WORDS = st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1).filter(
    lambda word: word.split() == [word] and word != splits_and_tokens.EOS
)
ALPHABET = st.characters(exclude_categories=["Cs"])


def test_embedded_text_is_split_by_position_without_loss():
    from pydoc_data.topics import topics

    splits = splits_and_tokens.load_splits()
    whole = "\n".join(topics[key] for key in sorted(topics))
    assert splits.train + splits.valid + splits.test == whole
    assert len(splits.train) / len(whole) == pytest.approx(0.9, abs=0.01)
    assert len(splits.valid) / len(whole) == pytest.approx(0.05, abs=0.01)
    assert splits.train.endswith("\n") and splits.valid.endswith("\n")
    assert platform.python_version() in splits.name
    assert len(whole.split()) > 50_000


@pytest.mark.parametrize("pattern", ["{}.txt", "wiki.{}.tokens", "ptb.{}.txt"])
def test_folder(tmp_path, pattern):
    for part in ("train", "valid", "test"):
        (tmp_path / pattern.format(part)).write_text(f"the {part} text\n")
    splits = splits_and_tokens.load_splits(str(tmp_path))
    assert splits == ("the train text\n", "the valid text\n", "the test text\n", tmp_path.name)


def test_folder_without_the_files_says_what_it_has(tmp_path):
    (tmp_path / "training.txt").write_text("a\n")
    with pytest.raises(UserError, match=r"needs train\.txt.*it has training\.txt"):
        splits_and_tokens.load_splits(str(tmp_path))
    (tmp_path / "train.txt").write_text("a\n")
    with pytest.raises(UserError, match=r"valid\.txt: No such file"):
        splits_and_tokens.load_splits(str(tmp_path))


@given(lines=st.lists(st.text(ALPHABET).filter(str.strip), min_size=60, max_size=100))
def test_one_file_is_split_without_loss(tmp_path_factory, lines):
    file = tmp_path_factory.mktemp("text") / "one.txt"
    file.write_bytes("\n".join(lines).encode())
    splits = splits_and_tokens.load_splits(str(file), (0.6, 0.2, 0.2))
    assert "".join(splits[:3]) == splits_and_tokens.read_text(file)
    assert all(part.strip() for part in splits[:3])


def test_split_divides_no_line_and_no_word(tmp_path):
    file = tmp_path / "one.txt"
    file.write_text("".join(f"line number {i}\n" for i in range(400)))
    splits = splits_and_tokens.load_splits(str(file))
    assert all(part.startswith("line number") and part.endswith("\n") for part in splits[:3])
    file.write_text(" ".join(f"word{i}" for i in range(400)))
    splits = splits_and_tokens.load_splits(str(file))
    assert all(part.startswith("word") for part in splits[:3])
    file.write_text("x" * 1000)  # as in a language without spaces
    assert [len(part) for part in splits_and_tokens.load_splits(str(file))[:3]] == [900, 50, 50]


def test_text_too_short_to_be_split(tmp_path):
    file = tmp_path / "one.txt"
    file.write_text("a single line\n")
    with pytest.raises(UserError, match=r"one\.txt is too short \(14 characters\)"):
        splits_and_tokens.load_splits(str(file))


def test_read_text_errors(tmp_path):
    with pytest.raises(UserError, match=r"missing\.txt: No such file"):
        splits_and_tokens.read_text(tmp_path / "missing.txt")
    with pytest.raises(UserError, match="directory"):
        splits_and_tokens.read_text(tmp_path)
    file = tmp_path / "text.txt"
    for empty in (b"", b" \n\n\t"):
        file.write_bytes(empty)
        with pytest.raises(UserError, match="is empty"):
            splits_and_tokens.read_text(file)
    file.write_bytes("hé".encode() + b"llo \xff\n")
    with pytest.raises(UserError, match=r"text\.txt is not UTF-8: byte 0xff at offset 7 "):
        splits_and_tokens.read_text(file)


def test_read_text_normalises_line_ends_and_mark(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert splits_and_tokens.read_text(file) == "one\ntwo\nthree\n"


def test_tokenize_words():
    given_text = " = Title = \n \n\nA  line\twith\x0ca form feed\nno end"
    expected = "= Title = <eos> A line with a form feed <eos> no end <eos>"
    assert splits_and_tokens.tokenize(given_text, "word") == expected.split()


@given(lines=st.lists(st.lists(WORDS, min_size=1)))
def test_words_survive_the_way_there_and_back(lines):
    tokens = [token for line in lines for token in [*line, splits_and_tokens.EOS]]
    assert splits_and_tokens.tokenize(splits_and_tokens.detokenize(tokens), "word") == tokens


@given(content=st.text(ALPHABET))
def test_characters_are_all_of_the_text(content):
    tokens = splits_and_tokens.tokenize(content, "char")
    assert len(tokens) == len(content)
    assert splits_and_tokens.detokenize(tokens, "char") == content


def test_unknown_level():
    with pytest.raises(UserError, match=r"data\.level='words': give word or char"):
        splits_and_tokens.tokenize("a", "words")
    with pytest.raises(UserError, match="word or char"):
        splits_and_tokens.detokenize(["a"], "letter")


def test_fractions_are_checked():
    for fractions in ((0.9, 0.1, 0.0), (0.5, 0.2, 0.2)):
        with pytest.raises(ValueError, match="fractions"):
            splits_and_tokens.load_splits(None, fractions)


def test_pipes_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(UserError, match="cannot read the text .*: it is a pipe or a device"):
            splits_and_tokens.read_text(path)
