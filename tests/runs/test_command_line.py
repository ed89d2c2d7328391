"""The command line: flags, config files and overrides, and one line for each error."""

import pytest
from absl import flags

from tfwd.lm.config import SCHEMA
from tfwd.runs.errors import UserError
from tfwd.runs.settings.command_line import call_function_in_file, parse

CONFIG = """
from tfwd.lm.config import default_config

def get_config(name="plain"):
    config = default_config()
    config.data.window = {"plain": 20, "long": 90}[name]
    return config
"""


def define(values):
    flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    flags.mark_flag_as_required("workdir", values)
    flags.DEFINE_integer("tokens", 200, "how many", flag_values=values)
    flags.DEFINE_bool("fresh", False, "begin anew", flag_values=values)


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    return str(path)


def read(*arguments, config=False):
    return parse(["program", *arguments], define, schema=SCHEMA if config else None)


def test_plain_flags():
    values = read("--workdir=here", "--tokens", "3", "--fresh")
    assert (values.workdir, values.tokens, values.fresh) == ("here", 3, True)
    assert read("--workdir=here").tokens == 200  # no values of the last parse remain


def test_config_and_overrides(config_file):
    values = read(
        "--workdir=here",
        f"--config={config_file}:long",
        "--config.model.hidden_units=300,200,128",
        "--config.model.weight_dropout=0",
        "--noconfig.model.recompute",
        "--config.optimizer.kwargs.momentum=0.9",
        "--config.data.path",
        "a folder",
        config=True,
    )
    config = values.config
    assert config.data.window == 90
    assert config.model.hidden_units == (300, 200, 128)
    assert config.model.weight_dropout == 0.0 and isinstance(config.model.weight_dropout, float)
    assert config.model.recompute is False
    assert config.optimizer.kwargs.momentum == 0.9
    assert config.data.path == "a folder"
    with pytest.raises(AttributeError):
        config.model.more = 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.model.weigth_dropout=0.5"], "did you mean model.weight_dropout"),
        (["--config.model.weigth_dropout", "0.5"], "did you mean model.weight_dropout"),
        (["--noconfig.model.recompote"], "did you mean model.recompute"),
        (["--config.model={}"], "model is a group of config keys"),
        (["--config.data.window=1.5"], "--config.data.window=1.5: give a whole number, at least 1"),
        (["--config.model.weight_dropout=x"], "weight_dropout=x: give a rate"),
        (["--config.model.tie_weights=maybe"], "tie_weights=maybe: give true or false"),
        (["--config.model.hidden_units=3 4"], "hidden_units=3 4: give whole numbers"),
        (["--config.model.hidden_units=a,b"], "model.hidden_units"),
        (["--config.model.weight_dropout=1.0"], "model.weight_dropout=1.0: give a rate"),
        (["--config.optimizer.kwargs.momentun=1"], "did you mean momentum"),
        (["--wrokdir=b"], "there is no flag --wrokdir; similar flags: --workdir (see --help)"),
        (["--tokens=x"], "--tokens=x: give a whole number"),
        (["stray"], "'stray' is not a flag"),
        (["--tokens"], "tokens"),
    ],
)
def test_errors(config_file, arguments, words):
    with pytest.raises(UserError) as caught:
        read("--workdir=here", f"--config={config_file}", *arguments, config=True)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_flags(config_file):
    with pytest.raises(UserError, match="--workdir is missing; see --help"):
        read()
    for arguments in ((), ("--config.data.window=3",), ("--config",)):
        with pytest.raises(UserError, match="--config is missing; give a name or a file"):
            read("--workdir=here", *arguments, config=True)


def test_config_file_is_missing(config_file, tmp_path):
    with pytest.raises(UserError, match=r"there is no such file; .* has small\.py"):
        read("--workdir=here", f"--config={tmp_path}/smal.py", config=True)
    with pytest.raises(UserError, match=r"=nowhere/smal\.py: there is no such file$"):
        read("--workdir=here", "--config=nowhere/smal.py", config=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("def get_config(:", "invalid syntax in line 1"),
        ("x = 1", "get_config"),
        ("import nothing_like_it", "line 1: No module named 'nothing_like_it'"),
        (
            "from tfwd.lm.config import default_config\n"
            "def get_config():\n"
            "    config = default_config()\n"
            "    config.model.weigth_dropout = 0.5\n",
            "line 4: there is no config key weigth_dropout; did you mean model.weight_dropout",
        ),
        (
            "from tfwd.lm.config import default_config\n"
            "def get_config():\n"
            "    config = default_config()\n"
            "    config.data.window = 'long'\n",
            "line 4: Could not override field 'window'",
        ),
    ],
)
def test_broken_config_file(tmp_path, content, words):
    path = tmp_path / "broken.py"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        read("--workdir=here", f"--config={path}", config=True)
    assert words in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("del config['optimizer']", "has no optimizer.name; begin with default_config"),
        ("del config['optimizer']; config.optimizer = 3", "has no optimizer.name"),
        ("config.optimizer.kwargs.momentum = object()", "optimizer.kwargs.momentum=<object"),
        ("config.optimizer.kwargs.momentum = [float('nan')]", "optimizer.kwargs.momentum=[nan]"),
        ("config.model.me = config", "there is no config key model.me"),
        ("raise SystemExit(0)", "line 5: this ends the program"),
        ("config.sample.prompt = '\\udcff'", "give a UTF-8 text"),
        ("config.seed = 2 ** 32", "give a whole number, at least 0 and at most 4294967295"),
        ("config.training.patience = 10 ** 5000", "and at most 2147483647"),
    ],
)
def test_config_that_is_none(tmp_path, lines, words):
    path = tmp_path / "broken.py"
    head = "from tfwd.lm.config import default_config\ndef get_config():\n"
    body = f"    config = default_config()\n    config.unlock()\n    {lines}\n    return config\n"
    path.write_text(head + body)
    with pytest.raises(UserError) as caught:
        read("--workdir=here", f"--config={path}", config=True)
    assert words in str(caught.value)


@pytest.mark.parametrize("argument", ["beta_1=abc", "amsgrad=3", "beta_1=[]", "clipnorm=x"])
def test_arguments_of_the_optimizer_have_their_type(config_file, argument):
    arguments = ["--config.optimizer.name=adam", f"--config.optimizer.kwargs.{argument}"]
    with pytest.raises(UserError, match=rf"^optimizer.kwargs.{argument[:4]}.*: adam takes "):
        read("--workdir=here", f"--config={config_file}", *arguments, config=True)


@pytest.mark.parametrize(
    ("flag", "name", "function"),
    [("config", "quickstart", "get_config"), ("sweep", "rates", "get_sweep")],
)
def test_a_name_stands_for_a_file_of_tfwd(flag, name, function, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # without configs/
    assert call_function_in_file(flag, name, function, SCHEMA) is not None
    # A path works as before, also one that looks like a name.
    (tmp_path / name).write_text(f"def {function}():\n    return 'from the file'\n")
    assert call_function_in_file(flag, name, function, SCHEMA) == "from the file"


def test_an_unknown_name_lists_the_names():
    with pytest.raises(UserError) as error:
        call_function_in_file("config", "quikstart", "get_config", SCHEMA)
    assert str(error.value) == (
        "--config=quikstart: there is no such file, and tfwd has no config of this name; give a "
        "path, or one of these names: awd_lstm_ptb, awd_lstm_wikitext2, char, finetune, "
        "quickstart, wikitext2_small"
    )


def test_a_config_of_another_program_is_named():
    from tfwd.finetune.config import SCHEMA as OTHER

    with pytest.raises(UserError, match="--config=quickstart is a config of another program: it"):
        parse(["tfwd-finetune", "--config=quickstart"], lambda values: None, schema=OTHER)
