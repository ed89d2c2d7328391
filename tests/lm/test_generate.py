"""tfwd-generate from the command line."""

import json

import numpy as np
import pytest
from stack_marks import extended

from tfwd.lm import sampling
from tfwd.lm.commands import generate
from tfwd.lm.program import load
from tfwd.runs import command_runner
from tfwd.runs.errors import UserError
from tfwd.runs.storage import checkpoint


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        command_runner.run(
            generate.main, generate.define, generate.ABOUT, argv=["generate", *arguments]
        )
    return caught.value.code, *capsys.readouterr()


def test_flags_reach_the_drawing(make_run, capsys):
    run = make_run()
    found = load(run, "last")
    options = {"tokens": 12, "temperature": 1.25, "top_k": 4, "seed": 9}
    expected = sampling.generate(found.model, found.vocabulary, prompt="a b", **options)
    given = [f"--{name}={value}" for name, value in options.items()]
    arguments = [f"--workdir={run}", "--checkpoint=last", "--prompt=a b", *given]
    assert command(capsys, *arguments) == (0, expected + "\n", "")
    assert command(capsys, *arguments) == (0, expected + "\n", "")
    assert command(capsys, *arguments, "--seed=10")[1] != expected + "\n"


def test_defaults(make_run, capsys):
    run = make_run("char")
    code, out, _ = command(capsys, f"--workdir={run}")
    assert code == 0 and len(out) == 201  # and the last line's end


@extended
@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--temperature=-1", "temperature=-1.0: give a number, at least 0"),
        ("--temperature=hot", "--temperature=hot: give a number"),
        ("--tokens=-1", "tokens=-1: give a whole number, at least 0"),
        ("--topk=3", "there is no flag --topk; similar flags: --top_k"),
        ("--tokens=1" + "0" * 23, "give a whole number, at least 0 and at most 1000000"),
        ("--checkpoint=first", "--checkpoint=first: give best or last"),
    ],
)
def test_errors(make_run, capsys, argument, words):
    code, out, err = command(capsys, f"--workdir={make_run()}", argument)
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and words in err and len(err.splitlines()) == 1


def test_words_of_the_prompt_that_are_unknown_are_named(make_run, capsys):
    arguments = [f"--workdir={make_run()}", "--tokens=2", "--prompt=the zebra quantum zebra"]
    code, _, errors = command(capsys, *arguments)
    assert code == 0 and errors == "not in the vocabulary, read as unknown: zebra, quantum\n"


def test_weights_that_are_not_finite(make_run, capsys):
    run = make_run()
    (path,) = run.glob("best/*20/weights.npz")
    with np.load(path) as file:
        arrays = dict(file)
    arrays["decoder/bias"][3] = np.nan
    np.savez(path, **arrays)
    facts = {p.name: checkpoint._facts(p) for p in path.parent.iterdir() if "mani" not in p.name}
    (path.parent / "manifest.json").write_text(json.dumps(facts))
    code, out, err = command(capsys, f"--workdir={run}", "--tokens=2")
    assert (code, out) == (1, "") and len(err.splitlines()) == 1
    assert "step 20" in err and "not finite, in decoder/bias" in err
    model = load(run, "last").model
    model.decoder.bias.assign(np.full(model.vocabulary_size, 3e38))  # finite, but not their sum
    model.embedding.embeddings.assign(np.full(model.embedding.embeddings.shape, 3e38))
    with pytest.raises(UserError, match="the model's outputs for the next token are not finite"):
        list(sampling.draw(model, np.array([1]), 2, temperature=1.0, top_k=0, seed=0))
