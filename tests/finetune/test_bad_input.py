"""Bad data, pretrained folders and run folders: one line for each error, and nothing is lost."""

import json
import shutil

import numpy as np
import pytest
from finetune_tools import (
    BERT,
    LEARNT,
    TOKENS,
    make_config,
    write_data,
    write_pretrained,
    write_tokenizer,
)
from stack_marks import SOAK_ON_KERAS_2, extended

from tfwd.finetune.commands import classify
from tfwd.finetune.commands import train as program
from tfwd.finetune.config import SCHEMA, default_config
from tfwd.finetune.data import corpus, labelled_texts
from tfwd.runs import command_runner
from tfwd.runs.errors import UserError

pytestmark = SOAK_ON_KERAS_2

CONFIG = "from tfwd.finetune.config import default_config\ndef get_config():\n"


@pytest.fixture
def refused(tmp_path, data, pretrained, capsys):
    """Returns `refused(*flags)`: the one line with which tfwd-finetune refuses to start.

    Nothing may be written.
    """

    def start(*flags, workdir="run"):
        config = tmp_path / "config.py"
        values = make_config(data, pretrained, **LEARNT).to_dict()
        config.write_text(
            f"{CONFIG}    config = default_config()\n"
            f"    config.update({values!r})\n    return config\n"
        )
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            command_runner.run(
                program.main,
                program.define,
                program.ABOUT,
                schema=SCHEMA,
                argv=["tfwd-finetune", f"--config={config}", f"--workdir={tmp_path / workdir}"]
                + [f"--{flag}" for flag in flags],
            )
        error = capsys.readouterr().err
        assert ended.value.code == 1 and error.startswith("error: ") and error.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
        return error.removeprefix("error: ").strip()

    return start


GOOD = "good film\tpos\nbad film\tneg\nfine play\tpos\npoor play\tneg\n"

FILES = {  # the file, its content, and the line
    "no tab": ("train.tsv", GOOD + "dull\n", "train.tsv, line 5 has no tab"),
    "two tabs": ("test.tsv", "a\tb\tpos\n" + GOOD, "test.tsv, line 1 has 2 tabs"),
    "empty text": ("valid.tsv", GOOD + "  \tpos\n", "valid.tsv, line 5: the text is empty"),
    "empty label": ("valid.tsv", "good\t\n" + GOOD, "valid.tsv, line 1: the label is empty"),
    "not UTF-8": (
        "train.tsv",
        b"good \xff\tpos\n",
        "train.tsv is not UTF-8: byte 0xff at offset 5",
    ),
    "empty file": ("train.tsv", "", "train.tsv is empty"),
    "label in train only": (
        "train.tsv",
        GOOD + "so\tneutral\nit\tneutral\n",
        "the label 'neutral' is in train only, 2 times",
    ),
    "label not in train": (
        "test.tsv",
        GOOD + "so\tneutral\n",
        "the label 'neutral' is in test but not in train",
    ),
    "one example": (
        "train.tsv",
        "good\tpos\nfine\tpos\nbad\tneg\n",
        "the label 'neg' has one example in train",
    ),
    "header": (
        "train.tsv",
        "review\tclass\n" + GOOD,
        "give examples in valid or test, or remove it; if the first line of train.tsv is a "
        "header, name its columns: data.text='review' and data.label='class'",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_wrong_files(refused, tmp_path, case):
    name, content, line = FILES[case]
    folder = tmp_path / "data"
    folder.mkdir()
    for part in ("train", "valid", "test"):
        (folder / f"{part}.tsv").write_text(GOOD)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert line in refused(f"config.data.path={folder}")


def test_one_label_and_missing_files(refused, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    assert "there is no such folder" in refused(f"config.data.path={folder}-other")
    assert "has no train.tsv" in refused(f"config.data.path={folder}")
    for part in ("train", "test"):
        (folder / f"{part}.tsv").write_text("good\tpos\n" * 20)
    assert "all texts have the label 'pos'" in refused(f"config.data.path={folder}")
    (folder / "train.csv").write_text("text,label\n")
    assert "train.tsv and" in refused(f"config.data.path={folder}")


def no_file(name):
    return lambda folder: (folder / name).unlink()


def other_tokenizer(folder):
    write_tokenizer(folder / "tokenizer.json", [*TOKENS, "one", "more"])


def other_padding(folder):
    write_tokenizer(folder / "tokenizer.json", [TOKENS[1], TOKENS[0], *TOKENS[2:]])


def cut(name):
    def change(folder):
        (folder / name).write_bytes((folder / name).read_bytes()[:500])

    return change


def config_with(**values):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return change


FOLDERS = {
    "no config": (no_file("config.json"), "has no config.json"),
    "no tokenizer": (no_file("tokenizer.json"), "has no tokenizer.json"),
    "no weights": (no_file("model.safetensors"), "model.pretrained="),
    "other vocabulary": (other_tokenizer, "has another vocabulary: it has 22 tokens, and the enco"),
    "other padding": (other_padding, "has another vocabulary: it pads with 1"),
    "cut tokenizer": (cut("tokenizer.json"), "is not a complete tokenizer"),
    "cut weights": (cut("model.safetensors"), "model.safetensors"),
    "other family": (config_with(model_type="gpt2"), "model_type='gpt2'"),
    "other size": (config_with(intermediate_size=16), "intermediate"),
    "no size": (config_with(hidden_size="8"), "hidden_size='8' is not a whole number"),
    "heads": (config_with(num_attention_heads=3), "num_heads=3 does not divide hidden_size=8"),
    "more layers": (config_with(num_hidden_layers=3), "layer"),
    "T5": (lambda folder: shutil.copy(BERT.parent / "t5" / "config.json", folder), "t5"),
    "no tokens": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer cannot be read"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_wrong_pretrained_folders(refused, tmp_path, case):
    change, line = FOLDERS[case]
    folder = write_pretrained(tmp_path / "pretrained")
    change(folder)
    found = refused(f"config.model.pretrained={folder}")
    assert line in found and (str(folder) in found or case == "heads")


CONFIGS = {
    "model.pretrained=": "model.pretrained is missing",
    "model.pretrained=nowhere": "there is no such folder",
    "data.max_length=2": "data.max_length=2: each text has 2 special tokens",
    "data.max_length=13": "the encoder has 12 positions",
    "model.pooling=last": "model.pooling=last: give cls or pooler or mean",
    "model.freeze_layers=3": "model.freeze_layers=3: the encoder has 2 layers",
    "model.regularized=wings": "",
    "model.whole_inputs=True": "no effect without model.mixout or model.weight_dropout",
    "optimizer.decay_towards=start": "optimizer.decay_towards=start has no effect without a decay",
    "optimizer.layer_decay=0": "give a factor above 0",
    "data.windows=3": "there is no config key data.windows",
}


@pytest.mark.parametrize("flag", CONFIGS)
def test_wrong_values(refused, flag):
    more = ["config.model.weight_dropout=0.1"] if "regularized" in flag else []
    assert CONFIGS[flag] in refused(f"config.{flag}", *more)


def test_values_that_do_not_go_together():
    config = default_config()
    config.model.update({"weight_dropout": 0.1, "mixout": 0.1})
    with pytest.raises(UserError, match=r"model\.mixout=0\.1 with model\.weight_dropout=0\.1"):
        SCHEMA.check(config)


@pytest.mark.slow
def test_folders_of_another_run(refused, tmp_path, learnt):
    shutil.copytree(learnt, tmp_path / "run")
    (tmp_path / "run" / ".lock").unlink(missing_ok=True)
    (tmp_path / "run" / ".lock").touch()
    found = refused("config.model.pooling=cls")
    assert "holds a run with another configuration: model.pooling is mean in the folder" in found
    other = write_data(tmp_path / "other", [("train", 0, 9), ("valid", 0, 4), ("test", 0, 4)])
    found = refused(f"config.data.path={other}")
    assert "the data is not the data that the run" in found
    config = json.loads((learnt / "config.json").read_text())
    config["data"]["level"] = "word"
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert "is not a configuration of this program" in refused()


def classified(capsys, *flags, ok=True):
    with pytest.raises(SystemExit) as ended:
        command_runner.run(
            classify.main, classify.define, classify.ABOUT, argv=["tfwd-classify", *flags]
        )
    out, error = capsys.readouterr()
    assert ended.value.code == (0 if ok else 1)
    assert ok or (error.startswith("error: ") and error.count("\n") == 1)
    return out if ok else error


@extended
def test_classify_refuses(tmp_path, learnt, capsys):
    run = f"--workdir={learnt}"
    file = tmp_path / "texts.txt"
    file.write_text("good film\n\nbad\n")
    cases = {
        (run, "--text= "): "--text: the text is empty",
        (run, f"--file={file}"): "line 2: the text is empty",
        (run, f"--file={file}", "--text=a"): "give one of them",
        (run, "--checkpoint=first", "--text=a"): "--checkpoint=first",
        (f"--workdir={tmp_path}", "--text=a"): "there is no run in",
        ("--text=a",): "--workdir is missing",
    }
    for flags, line in cases.items():
        assert line in classified(capsys, *flags, ok=False)
    file.write_bytes(b"good\n\xff\n")
    assert "is not UTF-8" in classified(capsys, run, f"--file={file}", ok=False)
    broken = tmp_path / "broken"
    shutil.copytree(learnt, broken)
    (broken / "classes.json").write_text("{}")
    assert "is not a complete file of classes" in classified(
        capsys, f"--workdir={broken}", "--text=a", ok=False
    )
    from tfwd.lm.config import default_config as of_the_language_model

    (broken / "config.json").write_text(json.dumps(of_the_language_model().to_dict()))
    assert "is not a configuration of this program" in classified(
        capsys, f"--workdir={broken}", "--text=a", ok=False
    )


@extended
def test_classify_skips_empty_lines(tmp_path, learnt, capsys, monkeypatch):
    run, file = f"--workdir={learnt}", tmp_path / "texts.txt"
    file.write_text("\na superb film\n \n\nit was so awful\n\n\n")
    said = classified(capsys, run, f"--file={file}", ok=False)
    assert "line 1: the text is empty; give a text, or skip such lines with --skip_empty" in said
    out = classified(capsys, run, f"--file={file}", "--skip_empty")
    assert [row.split("\t")[2] for row in out.splitlines()] == ["a superb film", "it was so awful"]

    class Input:
        buffer = (b"\n", b"great\n", b"\n")

        def isatty(self):
            return False

    monkeypatch.setattr("sys.stdin", Input())
    assert classified(capsys, run, "--skip_empty").count("\n") == 1


def test_headers_of_tab_separated_files(tmp_path):
    """Checks headers with other names too, as in SST-2, and a label with the column's name."""
    file = tmp_path / "train.tsv"
    rows = [labelled_texts.Example("a fine film", "1"), labelled_texts.Example("a dull one", "0")]
    body = "".join(f"{text}\t{label}\n" for text, label in rows)
    for header in ("text\tlabel\n", "sentence\tlabel\n", "Sentence\tLabel\n", ""):
        file.write_text(header + body)
        assert labelled_texts.read_examples(file) == rows
    file.write_text("so it is\tlabel\nas it is\tlabel\n" + body)
    assert len(labelled_texts.read_examples(file)) == 4
    file.write_text("review\tclass\n" + body)
    assert len(labelled_texts.read_examples(file)) == 3
    assert labelled_texts.read_examples(file, "review", "class") == rows


def test_the_config_that_is_missing_is_this_programs(capsys):
    for flags, said in (
        ([], "error: --config is missing; give a name or a file, such as --config=finetune\n"),
        (["--help"], "name of a config of tfwd, such as finetune, or a Python"),
    ):
        with pytest.raises(SystemExit):
            command_runner.run(
                program.main,
                program.define,
                program.ABOUT,
                schema=SCHEMA,
                argv=["tfwd-finetune", *flags],
            )
        assert said in "".join(capsys.readouterr())


def test_classify_is_the_models_own_prediction(tmp_path, learnt, capsys, monkeypatch):
    from tfwd.finetune.program import load

    texts = ["a superb film", "it was so awful", "the play is dull", "great"]
    saved = load(learnt)
    expected = []
    for text in texts:
        (ids,) = saved.vocabulary.encode([text], 10)
        logits = saved.model(ids[None]).numpy().astype(np.float64)[0]
        shares = np.exp(logits) / np.exp(logits).sum()
        expected.append((saved.vocabulary.labels[shares.argmax()], shares))
    assert [label for label, _ in expected] == ["pos", "neg", "neg", "pos"]
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(texts) + "\n")
    out = classified(capsys, f"--workdir={learnt}", f"--file={file}", "--json")
    for line, text, (label, shares) in zip(out.splitlines(), texts, expected, strict=True):
        found = json.loads(line)
        assert (found["text"], found["label"]) == (text, label)
        np.testing.assert_allclose(list(found["probabilities"].values()), shares, atol=1e-6)
        assert found["probability"] == max(found["probabilities"].values())

    class Input:
        buffer = (b"great\n", b"it was so awful\n", b"\xff\n")

        def isatty(self):
            return False

    monkeypatch.setattr("sys.stdin", Input())
    with pytest.raises(SystemExit):
        command_runner.run(
            classify.main, classify.define, "", argv=["tfwd-classify", f"--workdir={learnt}"]
        )
    out, error = capsys.readouterr()
    rows = [line.split("\t") for line in out.splitlines()]
    assert [(row[0], row[2]) for row in rows] == [("pos", "great"), ("neg", "it was so awful")]
    assert float(rows[0][1]) == pytest.approx(expected[3][1].max(), abs=1e-4)
    assert "standard input, line 3 is not UTF-8: byte 0xff at offset 0" in error


def test_other_forms_of_files(tmp_path):
    rows = [('good, "very" good', "1"), ("bad\tone", "0")]
    (tmp_path / "a.csv").write_text('sentence,y,z\n"good, ""very"" good",1,x\nbad\tone,0,x\n')
    lines = [json.dumps({"sentence": text, "y": int(label)}) for text, label in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("a.csv", "a.jsonl"):
        found = labelled_texts.read_examples(tmp_path / name, "sentence", "y")
        assert [tuple(example) for example in found] == rows
        with pytest.raises(UserError, match=f"{name}.*text"):
            labelled_texts.read_examples(tmp_path / name)
    (tmp_path / "a.tsv").write_text("\ufefftext\tlabel\r\ngood\t1\r\n")
    assert labelled_texts.read_examples(tmp_path / "a.tsv") == [("good", "1")]
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": "b"}\n{"text":\n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        labelled_texts.read_examples(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud800", "label": "b"}\n')
    with pytest.raises(UserError, match="line 1: the text is not UTF-8"):
        labelled_texts.read_examples(tmp_path / "a.jsonl")
    (tmp_path / "a.csv").write_text("text,label\na,b,c\n")
    with pytest.raises(UserError, match="line 2 does not have the 2 columns"):
        labelled_texts.read_examples(tmp_path / "a.csv")


TWICE = {
    "text,label,label\na,b,c\n": ("csv", "a.csv: its first line names the column 'label' twice"),
    "id,id,text,label\n1,2,a,b\n": ("csv", "a.csv: its first line names the column 'id' twice"),
    '{"text": "a", "label": "b"}\n{"text": "c", "label": "b", "text": "d"}\n': (
        "jsonl",
        "a.jsonl, line 2 has the key 'text' twice; give each key once",
    ),
}


@pytest.mark.parametrize("content", TWICE)
def test_names_that_occur_twice(content, tmp_path):
    kind, message = TWICE[content]
    (tmp_path / f"a.{kind}").write_text(content)
    with pytest.raises(UserError) as caught:
        labelled_texts.read_examples(tmp_path / f"a.{kind}")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_columns_without_a_name_and_keys_of_inner_objects(tmp_path):
    """Checks names that may occur twice."""
    (tmp_path / "a.csv").write_text("text,label,,\na,b,,\n")
    line = '{"text": "a", "label": "b", "more": [{"text": 1}, {"text": 2, "text": 3}]}\n'
    (tmp_path / "a.jsonl").write_text(line)
    for name in ("a.csv", "a.jsonl"):
        assert labelled_texts.read_examples(tmp_path / name) == [("a", "b")]


def test_a_part_of_train_is_valid(tmp_path):
    folder = write_data(tmp_path / "data", [("train", 0, 20), ("test", 0, 4)])
    config = default_config()
    config.data.update({"path": str(folder), "valid_share": 0.25, "train_examples": 12})
    parts = corpus.load_splits(config.data).parts
    assert {name: len(part) for name, part in parts.items()} == {
        "train": 12,
        "valid": 10,
        "test": 8,
    }
    assert corpus.load_splits(config.data).parts == parts
