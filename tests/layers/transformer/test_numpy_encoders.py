"""Published configs of all kinds against BERT and ALBERT in NumPy (`tests/numpy_encoders.py`)."""

import json
from pathlib import Path

import keras
import numpy as np
import numpy_encoders as by_hand
import pytest
from safetensors.numpy import load_file, save_file
from stack_marks import extended, quick_rows

import tfwd
from tfwd import parametrizations
from tfwd.layers import transformer as T
from tfwd.pretrained import PlanError, load, plan
from tfwd.pretrained.target_variables import targets_of

IDS = np.array([[5, 6, 7, 8, 9], [3, 4, 5, 6, 7]])


def agrees(folder, config, tensors, **options):
    """Checks that the loaded layer computes the same as NumPy."""
    bert = T.Bert.from_pretrained(folder, add_pooler=True)
    found = bert(IDS)
    last, pooled = by_hand.encode(config, tensors, IDS, **options)
    np.testing.assert_allclose(found["last_hidden_state"], last, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["pooler_output"], pooled, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("embedding_size", [12, 4])
def test_albert_has_a_projection_at_equal_widths_too(embedding_size, tmp_path):
    sizes = {"model_type": "albert", "embedding_size": embedding_size, "num_hidden_groups": 1}
    agrees(tmp_path, *by_hand.publish(tmp_path, **sizes))


def test_a_part_of_the_family_that_the_layer_lacks_is_an_error(tmp_path):
    """Checks that only the pooler and the named heads may be missing."""
    sizes = {"model_type": "albert", "embedding_size": 12, "num_hidden_groups": 1}
    by_hand.publish(tmp_path, **sizes)
    T.Bert.from_pretrained(tmp_path)
    with pytest.raises(PlanError, match=r"embedding_hidden_mapping_in.weight' is for a part of"):
        T.Bert.from_pretrained(tmp_path, project=False)
    by_hand.publish(tmp_path)
    with pytest.raises(PlanError, match=r"'embeddings.token_type_embeddings.weight' is for a part"):
        T.Bert.from_pretrained(tmp_path, type_vocabulary_size=0)


@quick_rows("18-14", "36-14", "7-3", "6-3")
@pytest.mark.parametrize(
    ("layers", "groups"),
    [*((18, 14), (27, 21), (36, 14), (42, 18), (44, 20), (45, 35), (46, 30)), (6, 3), (7, 3)],
)
def test_which_layers_share_their_weights(layers, groups):
    """Checks that the group of layer i is `int(i / (layers / groups))`, in floating point."""
    sizes = {"num_heads": 1, "hidden_size": 2, "intermediate_size": 1}
    stack = T.TransformerStack(layers, num_shared=groups, **sizes)
    called = []
    for number, layer in enumerate(stack.layers):
        layer.call = lambda x, mask=None, training=None, number=number: called.append(number) or x
    stack(np.ones((1, 1, 2), "float32"))
    assert called == [int(i / (layers / groups)) for i in range(layers)]


@extended
def test_albert_in_groups_of_unequal_sizes(tmp_path):
    sizes = {"model_type": "albert", "embedding_size": 4, "hidden_size": 6}
    sizes |= {"num_hidden_layers": 18, "num_hidden_groups": 14}
    agrees(tmp_path, *by_hand.publish(tmp_path, **sizes))


@quick_rows("gelu", "gelu_new", "gelu_10", "quick_gelu", "leaky_relu", "relu2", "mish")
@pytest.mark.parametrize("name", by_hand.ACTIVATIONS)
def test_activations_have_hugging_faces_formulas(name, tmp_path):
    agrees(tmp_path, *by_hand.publish(tmp_path, hidden_act=name))


@pytest.mark.parametrize("name", ["prelu", "laplace", "hardswish", "elu", "selu", "softplus"])
def test_activations_that_are_not_here(name, tmp_path):
    """Checks activations that are not supported, also those that only Keras has."""
    by_hand.publish(tmp_path, hidden_act=name)
    with pytest.raises(ValueError, match=f"hidden_act='{name}': .* is not supported; use one of"):
        T.Bert.from_config(tmp_path)


@pytest.mark.parametrize("model_type", ["xlm-roberta", "camembert"])
def test_families_that_are_built_like_roberta(model_type, tmp_path):
    config, tensors = by_hand.publish(tmp_path, model_type=model_type, pad_token_id=1)
    agrees(tmp_path, config, tensors)
    ids = np.array([[5, 6, 7, 1, 1], [8, 1, 1, 1, 1]])
    seen = (ids != 1)[:, None].repeat(5, 1)
    found = T.Bert.from_pretrained(tmp_path)(ids)
    expected, _ = by_hand.encode(config, tensors, ids, seen)
    np.testing.assert_allclose(found[0, :3], expected[0, :3], rtol=1e-4, atol=1e-4)


@quick_rows("epsilon-0.001", "num_heads-2")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_heads", 2),
        ("activation", "relu"),
        ("epsilon", 1e-3),
        ("padding_position", 1),
        ("padding_id", 3),
    ],
)
def test_arguments_that_no_shape_tells(name, value, tmp_path):
    """Checks arguments that no shape reveals, such as other heads on the same weights."""
    by_hand.publish(tmp_path)
    with pytest.raises(ValueError, match=f"{name} is .* in the config, but {value!r} in layer"):
        T.Bert.from_pretrained(tmp_path, **{name: value})
    layer = T.Bert.from_config(tmp_path, **{name: value})  # it may be equal for new weights
    layer(IDS)
    with pytest.raises(PlanError, match=f"{name} is .* in the config, but {value!r} in layer"):
        load(layer, tmp_path)
    same = {"num_heads": 3, "activation": "gelu_python", "epsilon": 1e-12}
    T.Bert.from_pretrained(tmp_path, **same, padding_id=None, dropout=0.3, attention_dropout=0.2)


def test_shared_layers_are_not_told_by_shapes(tmp_path):
    sizes = {"model_type": "albert", "embedding_size": 4, "num_hidden_layers": 4}
    by_hand.publish(tmp_path, **sizes, num_hidden_groups=2)
    with pytest.raises(ValueError, match="num_shared is 2 in the config, but 1 in layer"):
        T.Bert.from_pretrained(tmp_path, num_shared=1)
    by_hand.publish(tmp_path, **sizes, num_hidden_groups=4)
    assert len(T.TransformerStack.from_pretrained(tmp_path, layers=[3, 1]).layers) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "12"}, "hidden_size='12' is not a whole number: correct the file"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers=2.0 is not a whole number"),
        ({"num_attention_heads": True}, "num_attention_heads=True is not a whole number"),
        ({"layer_norm_eps": "1e-12"}, "layer_norm_eps='1e-12' is not a number"),
        ({"hidden_dropout_prob": None}, "hidden_dropout_prob=None is not a number"),
        ({"vocab_size": 0}, "vocab_size=0: expected at least 1"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps=nan: expected at least 0"),
    ],
)
def test_configs_whose_numbers_are_none(change, message, tmp_path):
    by_hand.publish(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, **change}))
    with pytest.raises(ValueError, match=message):
        T.Bert.from_config(tmp_path)


def prefixed(folder, prefix):
    """Writes the same file with a prefix on its keys."""
    tensors = load_file(folder / "model.safetensors")
    save_file({prefix + k: v for k, v in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_a_layer_that_was_made_from_a_config_knows_its_keys(prefix, tmp_path):
    config, tensors = by_hand.publish(tmp_path)
    prefixed(tmp_path, prefix)
    expected, pooled = by_hand.encode(config, tensors, IDS)
    bert = T.Bert.from_config(tmp_path)
    bert(IDS)
    assert plan(bert, tmp_path).problems() == []
    load(bert, tmp_path, prefix=prefix or None)
    np.testing.assert_allclose(bert(IDS), expected, rtol=1e-4, atol=1e-4)
    embeddings, pooler = T.Embeddings.from_config(tmp_path), T.Pooler.from_config(tmp_path)
    stack = T.TransformerStack.from_config(tmp_path)
    pooler(stack(embeddings(IDS)))
    for part in (embeddings, stack, pooler):
        load(part, tmp_path)
    np.testing.assert_allclose(pooler(stack(embeddings(IDS))), pooled, rtol=1e-4, atol=1e-4)


def test_layers_inside_a_model_know_their_keys(tmp_path):
    config, tensors = by_hand.publish(tmp_path)
    expected, _ = by_hand.encode(config, tensors, IDS)
    ids = keras.Input((None,), dtype="int32")
    hidden = T.Bert.from_config(tmp_path, name="encoder")(ids)
    outputs = [hidden, keras.layers.Dense(3, name="head")(hidden)]
    model = keras.Model(ids, outputs)
    with pytest.raises(PlanError, match="'head/kernel' has no key 'head/kernel' in the file"):
        load(model, tmp_path)
    load(model, tmp_path, allow_missing="head/.*")
    np.testing.assert_allclose(model(IDS)[0], expected, rtol=1e-4, atol=1e-4)
    # Its parts as two layers, of which each leaves the other's keys out; and some layers alone.
    embedded = T.Embeddings.from_config(tmp_path, name="lower")(ids)
    stack = T.TransformerStack.from_config(tmp_path, name="upper")
    model = keras.Model(ids, stack(embedded))
    load(model, tmp_path, ignore=r"pooler\..*")
    np.testing.assert_allclose(model(IDS), expected, rtol=1e-4, atol=1e-4)
    upper = T.TransformerStack.from_config(tmp_path, layers=[1])
    upper(np.ones((1, 2, 12), "float32"))
    load(upper, tmp_path)
    theirs = tensors["encoder.layer.1.output.dense.weight"].T
    np.testing.assert_array_equal(upper.layers[0].output_dense.kernel, theirs)
    dropped = tfwd.parametrize(model, {".*/kernel": parametrizations.Dropout(0.5)})
    assert plan(dropped, tmp_path, ignore=r"pooler\..*").problems() == []


def test_a_head_beside_an_encoder(tmp_path):
    """The encoder's keys have a prefix, and the head's keys have none."""
    config, tensors = by_hand.publish(tmp_path)
    prefixed(tmp_path, "bert.")
    w, b = np.ones((3, 12), "float32") / 7, np.arange(3, dtype="float32")
    stored = load_file(tmp_path / "model.safetensors")
    stored |= {"classifier.weight": w, "classifier.bias": b}
    save_file(stored, tmp_path / "model.safetensors")
    ids = keras.Input((None,), dtype="int32")
    bert = T.Bert.from_config(tmp_path, name="bert", add_pooler=True)
    head = keras.layers.Dense(3, name="head")
    model = keras.Model(ids, head(bert(ids)["pooler_output"]))
    mapping = {"head": "classifier"}
    with pytest.raises(PlanError, match=r"give family_rules=layer.family_rules\('bert/'\) too"):
        load(model, tmp_path, mapping=mapping)
    load(model, tmp_path, mapping=mapping, family_rules=bert.family_rules("bert/"))
    _, pooled = by_hand.encode(config, tensors, IDS)
    np.testing.assert_allclose(model(IDS), pooled @ w.T + b, rtol=1e-4, atol=1e-4)


def test_two_encoders_of_two_files(tmp_path):
    """A pattern for missing variables does not say that a layer has another file."""
    by_hand.publish(tmp_path)
    ids = keras.Input((None,), dtype="int32")
    question, document = (T.Bert.from_config(tmp_path, name=n) for n in ("question", "document"))
    model = keras.Model(ids, [question(ids), document(ids)])
    before = document.get_weights()
    ignored = {"ignore": r"pooler\..*"}
    with pytest.raises(PlanError, match="also for 'question/.*call load for each layer"):
        load(model, tmp_path, allow_missing="document/.*", **ignored)
    load(question, tmp_path, **ignored)
    for ours, theirs in zip(document.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    load(model, tmp_path, **ignored)  # both from one file
    for ours, theirs in zip(document.weights, question.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_t5_knows_its_keys():
    folder = Path(__file__).parent / "published" / "t5_gated"
    t5, decoder = T.T5.from_config(folder), T.T5Stack.from_config(folder, is_decoder=True)
    t5(IDS, IDS)
    decoder(np.ones((1, 2, 8), "float32"), np.ones((1, 2, 8), "float32"))
    load(t5, folder)
    load(decoder, folder)
    with np.load(folder / "expected.npz") as found:
        ids, said, mask = (found[k] for k in ("input_ids", "decoder_input_ids", "attention_mask"))
        np.testing.assert_allclose(t5(ids, said, mask=mask), found["logits"], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(decoder.weights, t5.decoder.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_converted_file_has_paths_as_keys(tmp_path):
    """Checks that the output of `tfwd-pretrained convert` is read without a mapping."""
    by_hand.publish(tmp_path)
    stack = T.TransformerStack.from_pretrained(tmp_path)
    arrays = {t.path: np.asarray(t.variable) for t in targets_of(stack)}
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, tmp_path / "s.safetensors")
    other = T.TransformerStack.from_config(tmp_path)
    other(np.ones((1, 2, 12), "float32"))
    load(other, tmp_path / "s.safetensors")
    for ours, theirs in zip(other.weights, stack.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_plans_of_wrong_arguments(tmp_path):
    by_hand.publish(tmp_path)
    with pytest.raises(TypeError, match="model=None: give a built Keras model or layer"):
        plan(None, tmp_path)
    with pytest.raises(TypeError, match=r"mapping=\['a'\] is a list: give a dict from patterns"):
        plan(T.Bert.from_pretrained(tmp_path), tmp_path, mapping=["a"])
