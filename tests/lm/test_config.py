"""The configuration: its table, its check, its file, and the files in configs/."""

import importlib.util
import json
import os

import pytest

from tfwd.lm.config import KEYS, SCHEMA, default_config
from tfwd.runs.errors import UserError, suggest
from tfwd.runs.settings import command_line, validators
from tfwd.runs.settings import config as config_lib

# A wrong value for each key, and a part of the expected message.
WRONG = {
    "seed": (-1, "a whole number, at least 0"),
    "data.level": ("wrd", r"word or char \(did you mean word\?\)"),
    "data.min_count": (0, "at least 1"),
    "data.batch_size": (0, "at least 1"),
    "data.eval_batch_size": (-3, "at least 1"),
    "data.window": (4, "a window has at least 5 steps"),
    "data.eval_window": (0, "at least 1"),
    "model.embedding_dim": (0, "at least 1"),
    "model.hidden_units": ((), "one per layer, such as 300,150"),
    "model.weight_dropout": (1.0, "a rate: at least 0, below 1"),
    "model.variational_noise": (-0.1, "a number, at least 0"),
    "model.noise_start_step": (-1, "a whole number"),
    "model.embedding_dropout": (-0.1, "a rate"),
    "model.input_dropout": (float("nan"), "a rate"),
    "model.hidden_dropout": (1.5, "a rate"),
    "model.output_dropout": (float("inf"), "a rate"),
    "model.activation_regularization": (-1.0, "a number, at least 0"),
    "model.temporal_activation_regularization": (float("nan"), "a number, at least 0"),
    "model.init_scale": (0.0, "a number above 0"),
    "model.dtype_policy": ("mixed_float61", r"did you mean mixed_float16"),
    "optimizer.name": ("adamm", r"did you mean adam"),
    "optimizer.learning_rate": (0.0, "a number above 0"),
    "optimizer.weight_decay": (-1e-6, "a number, at least 0"),
    "optimizer.decay_scale": ("rate", "absolute or learning_rate or schedule"),
    "optimizer.decay_include": ("(", "regular expressions"),
    "optimizer.decay_exclude": ("bias [", "regular expressions"),
    "optimizer.decay_multipliers": ("bias=-1", "pattern=factor"),
    "optimizer.decay_sparse": ("row", "table or rows"),
    "optimizer.l2": (-1.0, "a number, at least 0"),
    "optimizer.non_monotone_interval": (-1, "a whole number"),
    "optimizer.steps_per_update": (0, "at least 1"),
    "optimizer.clip_norm": (-0.25, "a number, at least 0"),
    "training.epochs": (0, "at least 1"),
    "training.patience": (-1, "at least 0"),
    "training.lr_decay_factor": (1.5, "a factor above 0, at most 1"),
    "training.lr_decay_patience": (0, "at least 1"),
    "training.min_learning_rate": (-1.0, "at least 0"),
    "training.checkpoint_seconds": (-1.0, "at least 0"),
    "training.checkpoint_steps": (-1, "at least 0"),
    "training.keep_checkpoints": (0, "at least 1"),
    "training.log_steps": (0, "at least 1"),
    "numerics.check": ("stop", "raise or skip or restore or off"),
    "gradients.every": (-1, "at least 0"),
    "sample.tokens": (-1, "at least 0"),
    "sample.temperature": (-0.5, "a number, at least 0"),
    "sample.top_k": (-1, "at least 0"),
}
OF_ONE_TYPE = (validators.FLAG, validators.TEXT, validators.MAPPING)  # ConfigDict checks the type


def set_key(config, key, value):
    group, _, name = key.rpartition(".")
    setattr(config[group] if group else config, name, value)


def test_defaults_are_valid_and_complete():
    config = default_config()
    SCHEMA.check(config)
    assert {*config_lib.flat_keys(config), "optimizer.kwargs"} == set(KEYS)


def test_every_key_has_a_wrong_value_here():
    unchecked = {key for key, row in KEYS.items() if row.validator in OF_ONE_TYPE}
    assert set(WRONG) | unchecked == set(KEYS)


@pytest.mark.parametrize("key", WRONG)
def test_wrong_value(key):
    value, words = WRONG[key]
    config = default_config()
    set_key(config, key, value)
    with pytest.raises(UserError, match=words) as caught:
        SCHEMA.check(config)
    assert str(caught.value).startswith(f"{key}=")
    assert "\n" not in str(caught.value)


def test_units_of_a_layer_are_whole_numbers():
    for wrong in ((0,), (1.5,), ("a",), (True,)):
        config = default_config()
        config.model.tie_weights = False
        config.model.hidden_units = wrong
        with pytest.raises(UserError, match=r"model\.hidden_units"):
            SCHEMA.check(config)


def test_tied_weights_need_equal_widths():
    config = default_config()
    config.model.hidden_units = (256, 100)
    with pytest.raises(UserError, match=r"hidden_units=256,100: .*model\.embedding_dim=128"):
        SCHEMA.check(config)
    config.model.tie_weights = False
    SCHEMA.check(config)


def test_short_fixed_windows_are_allowed():
    config = default_config()
    config.data.window = 2
    config.data.random_windows = False
    SCHEMA.check(config)


def test_optimizer_arguments():
    config = default_config()
    config.optimizer.kwargs.momentum = 0.9
    SCHEMA.check(config)
    config.optimizer.kwargs.momentun = 0.9
    with pytest.raises(UserError, match=r"kwargs\.momentun: sgd has no .* mean momentum\?"):
        SCHEMA.check(config)
    del config.optimizer.kwargs["momentun"]
    config.optimizer.name = "Adam"
    with pytest.raises(UserError, match=r"kwargs\.momentum: Adam has no such argument"):
        SCHEMA.check(config)


def test_arguments_with_keys_of_their_own_are_not_taken_twice():
    for name in ("learning_rate", "weight_decay", "global_clipnorm"):
        config = default_config()
        config.optimizer.kwargs[name] = 0.1
        with pytest.raises(UserError, match=rf"optimizer\.kwargs\.{name}"):
            SCHEMA.check(config)


def test_locked_against_new_keys_and_other_types():
    config = default_config()
    with pytest.raises(AttributeError):
        config.model.weigth_dropout = 0.5
    with pytest.raises(TypeError):
        config.data.window = 1.5
    config.model.weight_dropout = 0  # an integer is a number
    assert config.model.weight_dropout == 0.0


def test_an_unlocked_config_is_checked_for_keys():
    config = default_config()
    config.unlock()
    config.model.layers = 3
    with pytest.raises(UserError, match=r"no config key model\.layers"):
        SCHEMA.check(config)
    config = default_config()
    config.unlock()
    del config.model["tie_weights"]
    with pytest.raises(UserError, match=r"has no model\.tie_weights; begin with default_config"):
        SCHEMA.check(config)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.weigth_dropout", "did you mean model.weight_dropout"),
        ("weight_dropout", "did you mean model.weight_dropout"),
        ("data.epochs", "training.epochs"),
        ("model", "model is a group of config keys; its keys are model.embedding_dim, "),
        ("sample.qqq", "the keys of sample are sample.tokens, sample.temperature"),
        (
            "zzz",
            "the groups are seed, data, model, optimizer, training, numerics, gradients, sample",
        ),
    ],
)
def test_unknown_key(key, words):
    assert not SCHEMA.known(key)
    assert words in SCHEMA.unknown(key)


def test_known_keys():
    assert SCHEMA.known("optimizer.kwargs.momentum")
    assert not SCHEMA.known("optimizer.kwargs.momentum.more")
    assert all(SCHEMA.known(key) for key in KEYS)


def test_describe_has_every_key_on_a_line_of_help():
    lines = SCHEMA.describe().splitlines()
    for key, row in KEYS.items():
        line = next(line for line in lines if line.strip().startswith(f"{key}="))
        assert line.strip().endswith(row.meaning)
        assert validators.shown(row.default) in line
    assert max(map(len, lines)) <= 120


def test_near_names():
    assert suggest("WEIGHT_DROPOUTS", ["weight_dropout", "weight_decay"]) == ["weight_dropout"]
    assert suggest("zzz", ["weight_dropout"]) == []
    assert suggest("anything", []) == []


def test_save_and_load(tmp_path):
    config = default_config()
    config.model.hidden_units = (7, 5, 128)
    config.optimizer.kwargs.momentum = 0.9
    config.data.path = "/a/folder of mine"
    config_lib.save(config, tmp_path / "config.json")
    loaded = SCHEMA.load(tmp_path / "config.json")
    assert loaded == config
    assert loaded.model.hidden_units == (7, 5, 128)
    with pytest.raises(AttributeError):
        loaded.model.more = 1


def test_load_refuses_a_wrong_configuration(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(UserError, match=r"cannot read the configuration .*No such file"):
        SCHEMA.load(file)
    config_lib.save(default_config(), file)
    whole = file.read_text()
    file.write_text(whole[:100])
    with pytest.raises(UserError, match="is not a complete configuration"):
        SCHEMA.load(file)
    for content in ([], {}, {"model": {"hidden_units": 3}}):
        file.write_text(json.dumps(content))
        with pytest.raises(UserError, match="is not a configuration of this program"):
            SCHEMA.load(file)
    content = json.loads(whole)
    content["model"]["wings"] = 2
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="wings"):
        SCHEMA.load(file)
    content = json.loads(whole)
    content["model"]["weight_dropout"] = 2.0
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"model\.weight_dropout=2\.0"):
        SCHEMA.load(file)
    content = json.loads(whole)
    del content["training"]["log_steps"]  # a file from before there was the key
    file.write_text(json.dumps(content))
    assert SCHEMA.load(file) == default_config()


CONFIGS = ("quickstart", "wikitext2_small", "char", "awd_lstm_ptb", "awd_lstm_wikitext2")


@pytest.mark.parametrize("name", CONFIGS)
def test_config_files(root, name):
    path = root / "configs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    SCHEMA.check(module.get_config())
    assert f"tfwd-train --config={name}" in module.__doc__
    imports = [line for line in path.read_text().splitlines() if "import" in line.split()]
    assert imports == ["from tfwd.lm.config import default_config"]
    if name.startswith("awd_lstm"):
        config = module.get_config()
        assert "which tfwd has not reproduced" in module.__doc__
        assert config.model.hidden_units == (1150, 1150, 400)
        assert (config.optimizer.learning_rate, config.optimizer.clip_norm) == (30.0, 0.25)


def test_every_config_file_is_tested(root):
    # tests/finetune has the other.
    there = {path.stem for path in (root / "configs").glob("*.py")} - {"__init__"}
    assert there == {*CONFIGS, "finetune"}


def test_a_file_that_was_changed_within_the_second_is_read_again(tmp_path):
    path = tmp_path / "some.py"
    for value in (1, 2):
        path.write_text(f"def get_config():\n    return {value}\n")
        os.utime(path, (0, 0))
        assert (
            command_line.call_function_in_file("config", str(path), "get_config", SCHEMA) == value
        )
    assert [each.name for each in tmp_path.iterdir()] == ["some.py"]
