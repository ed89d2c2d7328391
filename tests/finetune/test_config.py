"""The config files of fine-tuning, and the text that comes with Python."""

import collections
import importlib.util

import pytest
from stack_marks import SOAK_ON_KERAS_2, extended

from tfwd.finetune.config import SCHEMA
from tfwd.finetune.data import python_docstrings
from tfwd.runs.errors import UserError
from tfwd.runs.sweeps.sweep import check, load_sweep

pytestmark = SOAK_ON_KERAS_2


def test_config_and_sweep_files(root):
    path = root / "configs" / "finetune.py"
    spec = importlib.util.spec_from_file_location("finetune", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    SCHEMA.check(config)
    assert "tfwd-finetune --config=finetune" in module.__doc__
    sweep = load_sweep(str(root / "configs" / "sweeps" / "finetune.py"), SCHEMA)
    assert check(sweep, config, SCHEMA) == []


@extended
def test_the_text_of_python(monkeypatch):
    splits = python_docstrings.load_python_docstrings()
    texts = [example.text for part in splits.parts.values() for example in part]
    assert len(set(texts)) == len(texts)  # each in one part only
    assert all(
        python_docstrings.LEAST <= len(text.split()) <= python_docstrings.WORDS for text in texts
    )
    assert python_docstrings.load_python_docstrings() == splits
    for name, size in zip(("train", "valid", "test"), python_docstrings.SIZES, strict=True):
        counts = collections.Counter(example.label for example in splits.parts[name])
        assert set(counts) == set(python_docstrings.AREAS)
        assert all(size / 2 < count <= size for count in counts.values()), counts
    monkeypatch.setattr(python_docstrings, "AREAS", {"nothing": "no_such_module"})
    with pytest.raises(UserError, match="too few sources of Python's own library"):
        python_docstrings.load_python_docstrings()


@pytest.mark.parametrize(
    ("given", "module"),
    [
        ([], "lm.commands.tune"),
        (["--program=train"], "lm.commands.tune"),
        (["--program=finetune"], "finetune.commands.tune"),
        (["--program", "finetune"], "finetune.commands.tune"),
    ],
)
def test_which_program_is_tuned(monkeypatch, given, module):
    import tfwd_programs

    found = []
    monkeypatch.setattr(tfwd_programs, "_run", found.append)
    monkeypatch.setattr("sys.argv", ["tfwd-tune", "--dry_run", *given, "--sweep=a"])
    tfwd_programs.tune()
    assert found == [module] and tfwd_programs.sys.argv == ["tfwd-tune", "--dry_run", "--sweep=a"]


def test_no_such_program_is_tuned(monkeypatch, capsys):
    import tfwd_programs

    monkeypatch.setattr("sys.argv", ["tfwd-tune", "--program=lm"])
    with pytest.raises(SystemExit) as ended:
        tfwd_programs.tune()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: --program=lm: give train or finetune\n"
