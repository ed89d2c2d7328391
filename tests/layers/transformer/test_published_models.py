"""Published models against outputs of Hugging Face's classes, from files of a few kB."""

import json
import re
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file

from tfwd import _keras
from tfwd.layers import transformer as T
from tfwd.pretrained import PlanError, load, plan

FOLDER = Path(__file__).parent / "published"
ENCODERS = [
    "bert",
    "bert_with_heads",
    "roberta",
    "distilbert",
    "electra",
    "albert",
    "albert_in_groups",
    "data2vec_text",
    "ernie",
]


def expected(name):
    with np.load(FOLDER / name / "expected.npz") as file:
        return dict(file)


def states(found, name="hidden_states"):
    return [found[f"{name}.{i}"] for i in range(sum(key.startswith(f"{name}.") for key in found))]


def given(found):
    types = found.get("token_type_ids")
    mask = {"mask": found["attention_mask"]}
    return (found["input_ids"],), {**mask, **({} if types is None else {"token_type_ids": types})}


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_equal_to_hugging_faces(name):
    found = expected(name)
    pooled = "pooler_output" in found
    bert = T.Bert.from_pretrained(FOLDER / name, add_pooler=pooled, return_all=True)
    args, options = given(found)
    outputs = bert(*args, **options)
    theirs = states(found)
    assert len(theirs) >= 3
    for ours, state in zip(outputs["hidden_states"], theirs, strict=True):
        close(ours, state)
    close(outputs["last_hidden_state"], theirs[-1])
    if pooled:
        close(outputs["pooler_output"], found["pooler_output"])


@pytest.mark.parametrize("name", ["t5", "t5_gated", "t5_activation"])
def test_t5_is_equal_to_hugging_faces(name):
    found = expected(name)
    t5 = T.T5.from_pretrained(FOLDER / name, return_all=True)
    outputs = t5(found["input_ids"], found["decoder_input_ids"], mask=found["attention_mask"])
    for key in ("encoder_hidden_states", "decoder_hidden_states"):
        for ours, theirs in zip(outputs[key], states(found, key), strict=True):
            close(ours, theirs)
    close(outputs["logits"], found["logits"])


def test_other_names_of_config_keys():
    """Checks the names that Hugging Face's configs accept beside the written names."""
    config = json.loads((FOLDER / "distilbert" / "config.json").read_text())
    for written, other in (("n_heads", "num_attention_heads"), ("dim", "hidden_size")):
        config[other] = config.pop(written)
    bert = T.Bert.from_config(config, return_all=True)
    bert.build(bert.any_input_shape())
    load(bert, FOLDER / "distilbert")
    found = expected("distilbert")
    args, options = given(found)
    close(bert(*args, **options)["last_hidden_state"], states(found)[-1])


def test_the_head_of_electra_for_multiple_choice(tmp_path):
    tensors = load_file(FOLDER / "electra" / "model.safetensors")
    shutil.copy(FOLDER / "electra" / "config.json", tmp_path)
    tensors["sequence_summary.summary.weight"] = np.zeros((8, 8), "float32")
    save_file(tensors, tmp_path / "model.safetensors")
    T.Bert.from_pretrained(tmp_path)


def test_a_gated_layer_without_feed_forward_proj():
    """Checks that the result of `feed_forward_proj` is enough, as in Hugging Face's configs."""
    config = json.loads((FOLDER / "t5_activation" / "config.json").read_text())
    del config["feed_forward_proj"]
    t5 = T.T5.from_config(config)
    assert (t5.gated, t5.activation) == (True, "relu")
    del config["is_gated_act"], config["dense_act_fn"]
    t5 = T.T5.from_config(config)
    assert (t5.gated, t5.activation) == (False, "relu")


@pytest.mark.parametrize("name", ["bert", "roberta", "albert"])
def test_parts_make_the_whole(name):
    """Checks embeddings, stack and pooler, each loaded alone; Keras's mask masks padding."""
    folder, found = FOLDER / name, expected(name)
    embeddings = T.Embeddings.from_pretrained(folder)
    stack, pooler = T.TransformerStack.from_pretrained(folder), T.Pooler.from_pretrained(folder)
    (ids,), options = given(found)
    types = {key: value for key, value in options.items() if key == "token_type_ids"}
    embedded = embeddings(tf.constant(ids), **types)
    np.testing.assert_array_equal(_keras.layers.get_mask(embedded), options["mask"])
    close(pooler(stack(embedded)), found["pooler_output"])


def test_some_layers_in_any_order():
    folder, found = FOLDER / "albert_in_groups", expected("bert")
    whole = T.TransformerStack.from_pretrained(FOLDER / "bert", return_all=True)
    some = T.TransformerStack.from_pretrained(FOLDER / "bert", layers=[1, 0, 1])
    assert some.num_layers == 3
    x = states(found)[0]
    first, second = whole.layers
    close(some(x), second(first(second(x))))
    assert len(some.weights) == 3 * len(first.weights)  # copies, which are trained apart
    with pytest.raises(ValueError, match=r"layers=\[1, 2\]: .*has 2 layers, numbered 0 to 1"):
        T.TransformerStack.from_pretrained(FOLDER / "bert", layers=[1, 2])
    with pytest.raises(ValueError, match="share the weights of 2, so only all layers can"):
        T.TransformerStack.from_pretrained(folder, layers=[0])
    one = T.TransformerStack.from_pretrained(FOLDER / "albert", layers=range(2))
    assert (one.num_layers, len(one.layers)) == (2, 1)


def test_the_last_layers_follow_the_first():
    """Checks that eight layers for two texts, then four for both, equal twelve layers."""
    found = expected("bert")
    mask = tf.constant(found["attention_mask"])
    lower = T.TransformerStack.from_pretrained(FOLDER / "bert", layers=[0])
    upper = T.TransformerStack.from_pretrained(FOLDER / "bert", layers=range(1, 2))
    close(upper(lower(states(found)[0], mask=mask), mask=mask), states(found)[-1])


def test_without_a_pooler_there_is_no_variable():
    bert = T.Bert.from_pretrained(FOLDER / "bert")
    assert not [path for path in _keras.variables.paths(bert) if "pooler" in path]
    assert bert(np.array([[5, 6]])).shape == (1, 2, 8)
    found = plan(bert, FOLDER / "bert", mapping={"words": "embeddings.word_embeddings"})
    assert any(
        "key 'pooler.dense.weight' belongs to no variable" in one for one in found.problems()
    )


def test_a_decoder_alone():
    decoder = T.T5Stack.from_pretrained(FOLDER / "t5", is_decoder=True)
    whole = T.T5.from_pretrained(FOLDER / "t5")
    assert len(decoder.layers) == 3
    for ours, theirs in zip(decoder.weights, whole.decoder.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match="num_layers=1: select the published layers"):
        T.TransformerStack.from_pretrained(FOLDER / "bert", num_layers=1)


def test_fresh_weights_and_overrides():
    bert = T.Bert.from_pretrained(FOLDER / "bert", load_weights=False, dropout=0.3, name="mine")
    other = T.Bert.from_pretrained(FOLDER / "bert", dropout=0.3, name="mine")
    assert (bert.dropout, bert.name) == (0.3, "mine")
    kernel = bert.stack.layers[0].attention.query.kernel
    assert 0.005 < float(np.std(kernel)) < 0.05 and bert.built
    assert type(other.stack.layers[0].attention.query.kernel_initializer).__name__ == (
        "TruncatedNormal"
    )
    with pytest.raises(TypeError, match="dropuot; expected vocabulary_size"):
        T.Bert.from_pretrained(FOLDER / "bert", dropuot=0.3)


@pytest.mark.parametrize("family", [T.Bert, T.T5])
def test_each_table_starts_with_its_own_numbers(family):
    """Checks that sublayers do not share an initializer, which may repeat its numbers."""
    name = family.__name__.lower()
    layer = family.from_pretrained(FOLDER / name, load_weights=False)
    values = [np.asarray(weight) for weight in layer.weights if np.std(np.asarray(weight))]
    assert len(values) > 4
    for i, value in enumerate(values):
        for other in values[:i]:
            assert value.shape != other.shape or not np.array_equal(value, other)


@pytest.mark.parametrize("family", [T.Bert, T.T5])
def test_weights_of_a_layer_that_is_not_built(family):
    folder = FOLDER / family.__name__.lower()
    layer, whole = family.from_config(folder), family.from_pretrained(folder)
    assert not layer.built
    load(layer, folder)
    assert len(layer.weights) == len(whole.weights)
    for ours, theirs in zip(layer.weights, whole.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_what_may_be_missing_begins_as_its_initializer_says(tmp_path):
    shutil.copytree(FOLDER / "bert", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="'layer_2/attention/query/kernel' has no key") as caught:
        T.TransformerStack.from_pretrained(tmp_path / "model")
    first, second = str(caught.value).splitlines()[1:3]
    assert first.startswith("- the config has 3 layers, but the file has 2")
    assert "'layer_2/" in second and "Is the file complete" in str(caught.value)
    with pytest.raises(PlanError, match="layer_0 is the file's layer 1, layer_1 is the file's lay"):
        T.TransformerStack.from_pretrained(tmp_path / "model", layers=[1, 2])
    stack = T.TransformerStack.from_pretrained(tmp_path / "model", allow_missing="layer_2/.*")
    fresh = stack.layers[2]
    assert 0.005 < float(np.std(fresh.attention.query.kernel)) < 0.05
    np.testing.assert_array_equal(fresh.output_norm.gamma, np.ones(8))
    np.testing.assert_array_equal(fresh.output_norm.beta, np.zeros(8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type='gpt2' is not supported.* albert, bert, .*t5"),
        ({"model_type": None}, "model_type=None"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        (
            {"hidden_act": "gelu_7"},
            "hidden_act='gelu_7': activation='gelu_7' is not supported",
        ),
        ({"is_decoder": True}, "is_decoder=True is not supported"),
        ({"model_type": "ernie", "use_task_id": True}, "use_task_id=True is not supported"),
        ({"hidden_size": 9}, "num_heads=2 does not divide hidden_size=9"),
    ],
)
def test_configs_that_are_not_built(tmp_path, change, message):
    shutil.copytree(FOLDER / "bert", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        T.Bert.from_pretrained(tmp_path / "model")


def test_configs_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist: pass the folder of a published"):
        T.Bert.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="config.json does not exist: a published model has its"):
        T.Bert.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json cannot be read: Expecting"):
        T.Bert.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json is not a config: it contains a list"):
        T.Bert.from_pretrained(tmp_path)


def test_wrong_folders_and_layer_numbers_are_errors():
    with pytest.raises(ValueError, match="from the network: .* hf download bert-base-uncased --lo"):
        T.Bert.from_pretrained("bert-base-uncased")
    with pytest.raises(ValueError, match="model_type='bert' is for Bert and its parts, but T5 is"):
        T.T5.from_pretrained(FOLDER / "bert")
    with pytest.raises(ValueError, match="model_type='t5' is for T5 and T5Stack, but Pooler is"):
        T.Pooler.from_pretrained(FOLDER / "t5")
    for layers in (4, "8-11", [True]):
        with pytest.raises(ValueError, match=f"{re.escape(repr(layers))}: expected layer numbers"):
            T.TransformerStack.from_pretrained(FOLDER / "bert", layers=layers)
    with pytest.raises(ValueError, match=r"layers=\[\]: .* has 2 layers, numbered 0 to 1"):
        T.TransformerStack.from_pretrained(FOLDER / "bert", layers=[])
    with pytest.raises(ValueError, match="None is not a path: pass the folder of a pub"):
        T.Bert.from_pretrained(None)
    assert T.TransformerStack.from_config(FOLDER / "bert", layers=np.arange(1)).num_layers == 1


def test_from_config_takes_a_folder_a_file_and_a_dict():
    said = json.loads((FOLDER / "bert" / "config.json").read_text())
    for source in (FOLDER / "bert", FOLDER / "bert" / "config.json", said):
        stack = T.TransformerStack.from_config(source, layers=[0], dropout=0.5)
        assert (stack.num_layers, stack.hidden_size, stack.dropout) == (1, 8, 0.5)
        again = T.TransformerStack.from_config(stack.get_config())
        assert again.get_config() == stack.get_config()


def test_a_tied_head_that_differs(tmp_path):
    shutil.copytree(FOLDER / "t5", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["shared.weight"]}, file)
    T.T5.from_pretrained(tmp_path / "model")
    save_file({**tensors, "lm_head.weight": tensors["shared.weight"] + 1}, file)
    with pytest.raises(PlanError, match="'shared.weight' and 'lm_head.weight' differ"):
        T.T5.from_pretrained(tmp_path / "model")
    t5 = T.T5.from_pretrained(tmp_path / "model", tied=False)
    np.testing.assert_array_equal(t5.head.kernel, tensors["shared.weight"].T + 1)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_saved_models_are_the_same(name, tmp_path):
    found = expected(name)
    if name == "t5":
        inputs = [keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")]
        layer = T.T5.from_pretrained(FOLDER / name)
        data = [found["input_ids"], found["decoder_input_ids"]]
    else:
        inputs = [keras.Input((None,), dtype="int32")]
        layer = T.Bert.from_pretrained(FOLDER / name)
        data = [found["input_ids"]]
    model = keras.Model(inputs if len(inputs) > 1 else inputs[0], layer(*inputs))
    before = model(data if len(data) > 1 else data[0])
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(data if len(data) > 1 else data[0]), before)


def test_a_copy_needs_the_rules_of_its_family(tmp_path):
    """Checks that the error says it, and that the argument of the error loads all weights."""
    folder = FOLDER / "bert"
    ids = keras.Input((None,), dtype="int32")
    bert = T.Bert.from_pretrained(folder)
    model = keras.Model(ids, bert(ids))
    model.save(tmp_path / "model.keras")
    ours = T.Bert(**{**bert.get_config(), "name": bert.name})
    ours(np.array([[5]]))
    for copy in (
        keras.models.load_model(tmp_path / "model.keras"),
        keras.models.clone_model(model),
    ):
        for weight in copy.weights:
            weight.assign(weight + 1)
        with pytest.raises(PlanError, match=f"layer '{bert.name}' does not know the keys of a pub"):
            load(copy, folder)
        rules = T.Bert.from_config(folder).family_rules(f"{bert.name}/")
        load(copy, folder, family_rules=rules)
        for weight, theirs in zip(copy.weights, model.weights, strict=True):
            np.testing.assert_array_equal(weight, theirs)
    with pytest.raises(PlanError, match=re.escape("=Bert.from_config(folder).family_rules('')")):
        load(ours, folder)
    done = load(ours, folder, family_rules=T.Bert.from_config(folder).family_rules())
    assert done.problems() == []


def test_two_streams_are_filled_by_one_models_weights():
    folder = FOLDER / "bert"
    both = T.BiModalEncoder(
        T.TransformerStack.from_config(folder, name="first"),
        T.TransformerStack.from_config(folder, layers=[1], name="second"),
        connections=[(1, 0), (2, 1)],
    )
    x = states(expected("bert"))[0]
    both(x, x)
    rest = {"ignore": ["embeddings.*", "pooler.*"], "allow_missing": ".*_to_.*"}
    mapping = {**T.mapping(folder, at="first"), **T.mapping(folder, at="second", layers=[1])}
    done = load(both, folder, mapping=mapping, **rest)
    assert len(done.steps) == 3 * 16 and len(done.missing) == 4 * 16
    whole = T.TransformerStack.from_pretrained(folder)
    for ours, theirs in zip(both.first.weights, whole.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(both.second.weights, whole.layers[1].weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(PlanError, match="'first_to_second_0/attention/query/kernel' has no"):
        load(both, folder, mapping=mapping, ignore=rest["ignore"])


@pytest.mark.parametrize("name", ["distilbert", "electra"])
def test_a_pooler_of_a_family_that_has_none(name):
    with pytest.raises(ValueError, match=f"add_pooler=True, but a {name} has no pooler: remove"):
        T.Bert.from_pretrained(FOLDER / name, add_pooler=True)
    bert = T.Bert.from_pretrained(FOLDER / name, add_pooler=True, allow_missing="pooler/.*")
    assert bert(np.array([[5, 6]]))["pooler_output"].shape == (1, 8)
