"""Arguments that shapes do not show must fit the weights. The oracle is Hugging Face's outputs."""

import json
import re
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

from tfwd.layers import transformer as T
from tfwd.pretrained import PlanError, load
from tfwd.pretrained.target_variables import targets_of

FOLDER = Path(__file__).parent / "published"
IDS = np.array([[2, 7, 9, 3]])


def with_config(folder, name="bert", **entries):
    """Copies a published model, with other entries in its config. None removes an entry."""
    shutil.copytree(FOLDER / name, folder, ignore=shutil.ignore_patterns("*.npz"))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **entries}), "utf-8")
    return folder


def file_of_paths(folder, at=""):
    """Writes a file whose keys are paths, as `tfwd-pretrained convert` writes them."""
    bert = T.Bert.from_pretrained(FOLDER / "bert")
    tensors = {at + each.path: np.array(each.variable) for each in targets_of(bert)}
    save_file(tensors, folder / "paths.safetensors")
    return folder / "paths.safetensors"


def mapping_of(name, at=""):
    """Returns the keys of an encoder without a pooler."""
    found = T.mapping(FOLDER / name, part="", at=at)
    return {pattern: key for pattern, key in found.items() if "pooler" not in pattern}


def made(folder=FOLDER / "bert", **arguments):
    bert = T.Bert.from_config(folder, **arguments)
    bert(IDS)
    return bert


def is_right(bert):
    with np.load(FOLDER / "bert" / "expected.npz") as found:
        outputs = bert(
            found["input_ids"], mask=found["attention_mask"], token_type_ids=found["token_type_ids"]
        )
        states = [key for key in found if key.startswith("hidden_states.")]
        last = found[f"hidden_states.{len(states) - 1}"]
    np.testing.assert_allclose(outputs, last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["paths", "mapping", "model"])
def test_a_changed_argument_with_other_keys(kind, tmp_path):
    """Checks keys that are paths, and a mapping."""
    source, options = FOLDER / "bert", {}
    if kind == "mapping":
        options = {"mapping": mapping_of("bert"), "ignore": "pooler.*"}
    else:
        source = file_of_paths(tmp_path, "bert/" if kind == "model" else "")
    bert = made(num_heads=1, name="bert")
    model = bert
    if kind == "model":
        ids = keras.Input((None,), dtype="int32")
        model = keras.Model(ids, bert(ids))
    before = [np.array(weight) for weight in model.weights]
    message = "num_heads is 2 in the config, but 1 in layer 'bert'.*: remove num_heads"
    with pytest.raises(PlanError, match=message) as caught:
        load(model, source, **options)
    assert str(caught.value).count("num_heads is") == 1
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight, value)
    bert = made()
    load(bert, source, prefix="bert/" if kind == "model" else None, **options)
    is_right(bert)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_attention_heads": 4}, "num_heads is 4 in the config, but 2 in layer 'bert'"),
        ({"hidden_act": "relu"}, "activation is 'relu' in the config, but 'gelu' in layer"),
        ({"layer_norm_eps": 1e-5}, "epsilon is 1e-05 in the config, but 1e-12 in layer 'bert'"),
        ({"model_type": "roberta"}, "padding_position is 0 in the config, but None in layer"),
        ({"position_embedding_type": "relative_key"}, "='relative_key' is not supported"),
    ],
)
def test_the_config_of_another_model(entries, message, tmp_path):
    """Checks the config in the folder of the weights, and beside their file."""
    folder = with_config(tmp_path / "other", **entries)
    for source in (folder, folder / "model.safetensors"):
        with pytest.raises(PlanError, match=re.escape(message)) as caught:
            load(made(name="bert"), source)
        assert "config.json" in str(caught.value)
    if "relative" not in message:
        assert "The weights need the value of the config: make the layer with" in str(caught.value)
        load(T.Bert.from_pretrained(folder), folder)


def test_the_config_beside_the_weights_decides(tmp_path):
    folder = with_config(tmp_path / "other", num_attention_heads=1)
    bert = made(folder, num_heads=2)
    load(bert, FOLDER / "bert")
    is_right(bert)
    roberta = T.Bert.from_config(FOLDER / "roberta", name="bert")
    roberta(IDS)
    with pytest.raises(PlanError, match="padding_position is None in the config, but 1 in layer"):
        load(roberta, FOLDER / "bert")


@pytest.mark.parametrize(("changed", "value"), [("num_heads", 1), ("activation", "relu")])
def test_a_layer_that_was_made_from_its_arguments(changed, value):
    """Checks `family_rules` for a layer that does not know its config."""
    arguments = {**made().get_config(), changed: value}
    bert = T.Bert.from_config(arguments)
    bert(IDS)
    rules = T.Bert.from_config(FOLDER / "bert").family_rules("")
    with pytest.raises(PlanError, match=f"{changed} is .* in the config, but '?{value}'? in layer"):
        load(bert, FOLDER / "bert", family_rules=rules)
    bert = T.Bert.from_config({**arguments, changed: getattr(made(), changed)})
    bert(IDS)
    load(bert, FOLDER / "bert", family_rules=rules)
    is_right(bert)


def test_layers_that_share_their_weights(tmp_path):
    folder = with_config(tmp_path / "other", "albert", num_hidden_layers=2)
    with pytest.raises(PlanError, match="num_layers is 2 in the config, but 3 in layer 'bert'"):
        load(made(FOLDER / "albert", name="bert"), folder)
    load(made(folder), folder)
    load(made(FOLDER / "albert", layers=range(2)), FOLDER / "albert")


def test_only_layers_with_weights_of_the_file_are_compared():
    """Checks two layers from two configs, each loaded from its own folder."""
    ids = keras.Input((None,), dtype="int32")
    names = ("bert", "roberta")
    berts = [T.Bert.from_config(FOLDER / name, name=name) for name in names]
    model = keras.Model(ids, [bert(ids) for bert in berts])
    for name, other in (names, names[::-1]):
        load(
            model,
            FOLDER / name,
            mapping=mapping_of(name, at=name),
            ignore="pooler.*",
            allow_missing=f"{other}/.*",
            strict=False,
        )
    is_right(berts[0])


@pytest.mark.parametrize("content", ["{}", '{"num_heads": 7}', "[]", '{"model_type": "other"}'])
def test_a_config_that_is_not_published(content, tmp_path):
    """Checks that the layer's own config decides."""
    (tmp_path / "config.json").write_text(content, "utf-8")
    source = file_of_paths(tmp_path)
    bert = made()
    load(bert, source)
    is_right(bert)
    with pytest.raises(PlanError, match="num_heads is 2 in the config, but 1 in layer"):
        load(made(num_heads=1), source)


def test_a_damaged_config(tmp_path):
    source = file_of_paths(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert",', "utf-8")
    with pytest.raises(PlanError, match="config.json cannot be read: .*: correct the file, or"):
        load(made(), source)
