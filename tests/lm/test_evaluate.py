"""tfwd-evaluate against the definition, and its messages about wrong input."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf
from stack_marks import SLOW_ON_KERAS_2, extended, quick_rows

from tfwd.lm.commands import evaluate
from tfwd.lm.data.splits_and_tokens import load_splits, tokenize
from tfwd.lm.evaluation import evaluate as loop_evaluate
from tfwd.lm.program import load
from tfwd.runs import command_runner
from tfwd.runs.errors import UserError

pytestmark = SLOW_ON_KERAS_2


def by_definition(found, tokens, batch_size):
    """Returns the mean of -log p(token | tokens before it in its column), one call per column."""
    ids = found.vocabulary.encode(tokens)
    length = len(ids) // batch_size
    nats = []
    for column in ids[: batch_size * length].reshape(batch_size, length):
        logits = found.model(tf.constant(column[None]), training=False).logits[0].numpy()
        logits = logits.astype(np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        nats += [-log_p[i, column[i + 1]] for i in range(length - 1)]
    return np.mean(nats), len(nats)


@quick_rows("word")
@pytest.mark.parametrize("level", ["word", "char"])
def test_figures_are_by_definition(make_run, level):
    found = load(make_run(level))
    text = "the cat  sat\n\non a zebra , and the dog saw it\n" * 5
    tokens = tokenize(text, level)
    for batch_size in (1, 4):
        nats, predicted = by_definition(found, tokens, batch_size)
        result = evaluate.evaluate_text(found, text, "a text", batch_size)
        assert result["nats"] == pytest.approx(nats, rel=1e-5)
        assert result["predicted"] == predicted
        assert result["perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)
        assert result["bits_per_token"] == pytest.approx(nats / math.log(2), rel=1e-5)
        assert result["tokens"] == len(tokens)
        seen = "the cat sat\non a zebra , and the dog saw it\n" * 5 if level == "word" else text
        assert result["characters"] == len(seen)
        bits = nats / math.log(2) * len(tokens) / len(seen)
        assert result["bits_per_character"] == pytest.approx(bits, rel=1e-5)
        unknown = [token not in found.vocabulary.tokens for token in tokens]
        assert result["unknown"] == pytest.approx(np.mean(unknown))
        assert 0 < result["unknown"] < 1
    if level == "char":
        assert result["bits_per_character"] == pytest.approx(result["bits_per_token"])


@extended
def test_short_texts_have_fewer_columns(make_run):
    found = load(make_run())  # 3 columns, windows of 7
    for words, columns in ((2, 1), (15, 1), (16, 2), (23, 2), (24, 3), (100, 3)):
        text = " ".join(["the"] * (words - 1)) + "\n"  # and the line's end
        result = evaluate.evaluate_text(found, text, "a text")
        assert result["tokens"] == words
        assert result["predicted"] == columns * (words // columns - 1)


def test_the_runs_own_test_text(make_run):
    found = load(make_run())
    splits = load_splits(found.config.data.path)
    expected = loop_evaluate(found.model, found.vocabulary.encode(tokenize(splits.test)), 3, 7)
    result = evaluate.evaluate_test(found)
    assert result["nats"] == expected.nats
    assert result["predicted"] == expected.tokens
    assert result["text"] == "text.txt, test"


def test_another_text_than_the_training_text(make_run, tmp_path):
    run = make_run()
    text = tmp_path / "text.txt"
    text.write_text(text.read_text() + "and more\n")
    with pytest.raises(UserError, match=r"text\.txt is not the text that .* give --text=FILE"):
        evaluate.evaluate_test(load(run))


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        command_runner.run(
            evaluate.main, evaluate.define, evaluate.ABOUT, argv=["evaluate", *arguments]
        )
    return caught.value.code, *capsys.readouterr()


def test_command(make_run, capsys, tmp_path):
    run = make_run()
    code, out, _ = command(capsys, f"--workdir={run}", "--json")
    assert code == 0 and len(out.splitlines()) == 1
    result = json.loads(out)
    code, out, _ = command(capsys, f"--workdir={run}")
    assert code == 0
    assert f"{result['perplexity']:,.2f}" in out and f"{result['bits_per_character']:.4f}" in out
    assert "bits per word" in out
    letter = tmp_path / "[letter].txt"
    letter.write_text("the cat sat\n" * 9)
    code, out, _ = command(capsys, f"--workdir={run}", f"--text={letter}", "--checkpoint=last")
    assert code == 0 and "[letter].txt" in out
    code, out, _ = command(capsys, f"--workdir={make_run('char')}")
    assert code == 0 and "bits per character" in out and "bits per word" not in out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"ab\xff", "is not UTF-8: byte 0xff at offset 2"),
        (b"\n\nx", None),  # two tokens, the word and the line's end, are enough
    ],
)
def test_texts_that_cannot_be_used(make_run, capsys, tmp_path, content, words):
    file = tmp_path / "letter.txt"
    file.write_bytes(content)
    code, out, err = command(capsys, f"--workdir={make_run()}", f"--text={file}")
    if words is None:
        assert code == 0
        return
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and words in err and len(err.splitlines()) == 1


def test_one_character_is_too_short(make_run, capsys, tmp_path):
    file = tmp_path / "letter.txt"
    file.write_text("x")
    code, _, err = command(capsys, f"--workdir={make_run('char')}", f"--text={file}")
    assert code == 1
    assert err.startswith("error: the text letter.txt has 1 tokens, too few for 1 columns")


@extended
def test_too_large_a_perplexity_is_no_number_in_json(make_run):
    found = load(make_run())
    *others, bias = found.model.get_weights()
    bias[found.vocabulary.unk_id] = 1e6
    found.model.set_weights([*others, bias])
    result = evaluate.evaluate_text(found, "the cat sat\n" * 5, "a text")
    assert result["perplexity"] is None and result["nats"] > 1e5
    json.loads(json.dumps(result, allow_nan=False))
    assert evaluate.table(result).row_count == 9
