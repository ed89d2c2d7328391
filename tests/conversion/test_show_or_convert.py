"""tfwd-pretrained: its output, its files and its exit codes."""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tfwd.conversion import show_or_convert
from tfwd.layers import transformer as T
from tfwd.pretrained import load

FOLDER = Path(__file__).parents[1] / "layers" / "transformer" / "published"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command line, and returns its exit code and its output."""

    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["tfwd-pretrained", *map(str, argv)])
        with pytest.raises(SystemExit) as caught:
            show_or_convert.run()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return call


def test_plan(run):
    code, out, err = run("plan", f"--source={FOLDER / 'bert'}")
    assert (code, err) == (0, "")
    assert "layer_1/LayerNorm/beta" in out and ".1.output.LayerNorm.bias" in out
    assert "stack/layer_1/attention_LayerNorm/gamma  " in out  # in a file nothing is cut
    assert "left out (2):" in out  # the pooler


def test_plan_of_some_layers_as_json(run):
    code, out, _ = run(
        "plan", f"--source={FOLDER / 'bert'}", "--model=stack", "--layers=1", "--json"
    )
    said = json.loads(out)
    assert code == 0 and len(said["steps"]) == 16
    assert said["steps"][0]["key"] == "encoder.layer.1.attention.self.query.weight"
    assert said["steps"][0]["variable"] == "layer_0/attention/query/kernel"


@pytest.mark.parametrize(
    ("name", "model", "variables"),
    [("t5", "all", 60), ("t5", "encoder", 18), ("t5", "decoder", 41), ("albert", "pooler", 2)],
)
def test_plans_of_parts(run, name, model, variables):
    code, out, err = run("plan", f"--source={FOLDER / name}", f"--model={model}", "--json")
    said = json.loads(out)
    assert (code, err, said["problems"]) == (0, "", [])
    assert len(said["steps"]) == variables


def test_a_plan_with_problems(run, tmp_path):
    config = json.loads((FOLDER / "bert" / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = FOLDER / "bert" / "model.safetensors"
    (tmp_path / "model.safetensors").write_bytes(weights.read_bytes())
    code, out, err = run("plan", f"--source={tmp_path}")
    assert code == 1 and "missing (16):" in out
    assert err.startswith("error: 'stack/layer_2/attention/query/kernel' has no key 'encoder.layer")
    code, out, err = run("convert", f"--source={tmp_path}", f"--out={tmp_path / 'a.keras'}")
    assert code == 1 and "nothing was written" in err and err.count("\n") == 1
    assert not list(tmp_path.glob("a*"))


def test_convert_to_a_keras_model(run, tmp_path):
    file = tmp_path / "model.keras"
    code, out, err = run("convert", f"--source={FOLDER / 'bert'}", f"--out={file}")
    assert (code, err) == (0, "") and out.startswith(f"{file}: 37 variables, ")
    ids = np.array([[5, 6, 7]])
    model = keras.models.load_model(file)
    np.testing.assert_allclose(model(ids), T.Bert.from_pretrained(FOLDER / "bert")(ids), rtol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]


def test_convert_to_safetensors(run, tmp_path):
    file = tmp_path / "stack.safetensors"
    options = [f"--source={FOLDER / 'bert'}", "--model=stack", "--layers=1,0"]
    file.write_text("precious")
    code, _, err = run("convert", *options, f"--out={file}")
    assert code == 1 and "exists already: give another name, or add --overwrite" in err
    assert file.read_text() == "precious"
    assert run("convert", *options, f"--out={file}", "--overwrite")[0] == 0
    other = tmp_path / "plain.txt"
    other.write_text("")
    assert file.stat().st_mode == other.stat().st_mode  # others can read it as any new file
    stack = T.TransformerStack.from_config(FOLDER / "bert", layers=[1, 0])
    stack.build((None, None, 8))
    load(stack, file)
    other = T.TransformerStack.from_pretrained(FOLDER / "bert", layers=[1, 0])
    for ours, theirs in zip(stack.weights, other.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give plan or convert, such as tfwd-pretrained plan --source=FOLDER"),
        (["paln", "--source=x"], "'paln' is not a command: give plan or convert"),
        (["plan", "--source=nowhere"], "nowhere does not exist: pass the folder of a"),
        (
            ["plan", "--source={bert}", "--model=encoder"],
            "a bert model has only the parts all, embeddings, stack, pooler; give one of these",
        ),
        (["plan", "--source={bert}", "--model=x"], "--model=x is not a part: give all or"),
        (["plan", "--source={bert}", "--layers=1-"], "--layers=1-: give numbers of layers, such"),
        (["plan", "--source={bert}", "--layers=1-0"], "1-0 runs backwards; give 0-1"),
        (["plan", "--source={bert}", "--layers=2"], "has 2 layers, numbered 0 to 1"),
        (["convert", "--source={bert}"], "--out is missing: give a file that ends in .keras"),
        (["convert", "--source={bert}", "--out=no/a.keras"], "there is no folder no"),
        (["convert", "--source={bert}", "--out=a.h5"], "give a file that ends in .keras or"),
    ],
)
def test_wrong_calls_are_one_line(run, argv, message):
    argv = [part.format(bert=FOLDER / "bert") for part in argv]
    if not any(part.startswith("--source") for part in argv):
        argv.append("--source=x")
    code, out, err = run(*argv)
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_help(run):
    for argv in (["--help"], ["plan", "--help"]):
        code, out, _ = run(*argv)
        assert code == 0 and "tfwd-pretrained convert --source=FOLDER" in out
