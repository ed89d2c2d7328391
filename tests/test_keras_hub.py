"""`tfwd.parametrize(..., in_place=True)` on models of keras-hub: `make test-peers`.

The models are small, with random weights. The oracle is a second plain model of the same class,
whose weights are set to the effective weights of a call.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from watched_processes import Processes, finish

import tfwd
from tfwd import parametrizations as P

hub = pytest.importorskip("keras_hub")
pytest.importorskip("tensorflow_text")
# Keras does not shuffle the data sets that keras-hub makes of texts.
pytestmark = pytest.mark.filterwarnings("ignore:.*shuffle=True.*:UserWarning")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, "the", "quick", "brown", "fox", "good", "bad"]
TEXTS = ["the quick brown fox", "good fox", "bad fox", "the bad brown fox"] * 2
LABELS = np.array([0, 1, 0, 1] * 2)
SIZES = {
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 16,
    "intermediate_dim": 32,
    "max_sequence_length": 8,
    "dropout": 0.0,
}
LETTERS = {"<|endoftext|>": 0, **{letter: i + 1 for i, letter in enumerate("abcdefghij")}}
LETTERS.update({"Ġ": 11, "ab": 12})
SENTENCES = ["ab cde", "fgh ab"] * 2

# Loads the file and prints predicted labels as JSON. The process has no tfwd.
LOAD = """
import sys
import numpy as np
sys.modules["tfwd"] = None
import keras, keras_hub
model = keras.saving.load_model(sys.argv[1], compile=False)
model.compile()
np.save(sys.argv[2], model.predict(sys.argv[3:], verbose=0))
"""


def with_large_weights(model: Any) -> Any:
    """Sets random weights. With keras-hub's first weights, dropout hardly changes the outputs."""
    random = np.random.default_rng(0)
    model.set_weights([random.normal(0.0, 0.4, w.shape) for w in model.get_weights()])
    return model


def classifier() -> Any:
    """Returns a classifier of texts that compiles itself."""
    keras.utils.set_random_seed(1)
    tokenizer = hub.models.BertTokenizer(vocabulary=WORDS)
    model = hub.models.BertTextClassifier(
        backbone=hub.models.BertBackbone(vocabulary_size=len(WORDS), **SIZES),
        num_classes=2,
        preprocessor=hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8),
        dropout=0.0,
    )
    return with_large_weights(model)


def language_model() -> Any:
    """Returns a language model of letters."""
    keras.utils.set_random_seed(1)
    tokenizer = hub.models.GPT2Tokenizer(vocabulary=LETTERS, merges=["a b"])
    model = hub.models.GPT2CausalLM(
        backbone=hub.models.GPT2Backbone(vocabulary_size=len(LETTERS), **SIZES),
        preprocessor=hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8),
    )
    return with_large_weights(model)


def added(model: Any) -> Any:
    (one,) = tfwd.added_parametrizations(model)
    return one


def set_effective_weights(plain: Any, model: Any) -> list[str]:
    """Sets a plain model's weights to the weights of the next training call. Returns the names.

    Args:
        plain: second model of the same class. Its weights have the same order.
        model: parametrized model.
    """
    one = added(model)
    effective = one.effective_weights(one.calls)
    assert len(plain.weights) == len(model.weights)
    unused = dict(effective)
    for variable, other in zip(model.weights, plain.weights, strict=True):
        assert variable.shape == other.shape
        name = next((n for n in unused if variable.path.endswith(n)), None)
        other.assign(variable.value if name is None else unused.pop(name))
    assert not unused
    return list(effective)


def assert_trains_on_effective_weights(model: Any, plain: Any, inputs: Any) -> None:
    """Compares outputs of one training call with the plain model's."""
    names = set_effective_weights(plain, model)
    assert names
    raw = plain(inputs, training=False)
    calls = added(model).calls
    np.testing.assert_allclose(model(inputs, training=True), raw, rtol=1e-4, atol=1e-5)
    assert added(model).calls == calls + 1
    assert np.abs(np.asarray(model(inputs, training=False)) - raw).max() > 1e-2


def hooked(model: Any) -> list[str]:
    return [layer.name for layer in model._flatten_layers() if "call" in vars(layer)]


def test_a_classifier_of_texts() -> None:
    model, plain = classifier(), classifier()
    kind, optimizer = type(model), model.optimizer
    before = model.predict(TEXTS, verbose=0)
    parts = {"(query|value)/kernel|dense/kernel": P.Dropout(0.3)}
    assert tfwd.parametrize(model, parts, seed=1, in_place=True) is model
    assert type(model) is kind and model.optimizer is optimizer
    np.testing.assert_array_equal(model.predict(TEXTS, verbose=0), before)
    assert added(model).calls == 0
    model.fit(TEXTS, LABELS, batch_size=4, epochs=2, verbose=0)
    assert added(model).calls == 4
    assert_trains_on_effective_weights(model, plain, model.preprocessor(TEXTS[:4]))
    model.evaluate(TEXTS, LABELS, verbose=0)
    assert added(model).calls == 5
    assert tfwd.unwrap(model) is model
    assert not hooked(model)
    after = model.predict(TEXTS, verbose=0)
    plain.set_weights(model.get_weights())
    np.testing.assert_array_equal(plain.predict(TEXTS, verbose=0), after)


def test_the_gradients_of_a_classifier() -> None:
    """Compares with the plain gradients, times the factors mask / keep."""
    model, plain = classifier(), classifier()
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    set_effective_weights(plain, model)
    inputs = model.preprocessor(TEXTS[:4])

    def gradients(of: Any, training: bool) -> list[np.ndarray]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(of(inputs, training=training)))
        variables = [v.value for v in of.trainable_variables]
        return [np.asarray(tf.convert_to_tensor(g)) for g in tape.gradient(loss, variables)]

    found, raw = gradients(model, True), gradients(plain, False)
    kernels = 0
    for variable, mine, other in zip(plain.trainable_variables, found, raw, strict=True):
        factor = 1.0
        if variable.path.endswith("kernel"):
            factor = 2.0 * (np.asarray(variable) != 0)
            kernels += 1
        np.testing.assert_allclose(mine, other * factor, rtol=1e-3, atol=1e-5)
    assert kernels == len(added(model).targeted)


def test_low_rank_adaptation_of_a_parametrized_classifier() -> None:
    model, plain = classifier(), classifier()
    tfwd.parametrize(model, {"query/kernel": P.Dropout(0.4)}, seed=1, in_place=True)
    draws = added(model).effective_weights(0)
    model.backbone.enable_lora(2)
    plain.backbone.enable_lora(2)
    for name, weight in added(model).effective_weights(0).items():
        np.testing.assert_array_equal(weight, draws[name])
    # Keras asks for it after enable_lora, because the optimizer has other weights.
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    raw = [np.asarray(v) for v in model.non_trainable_weights if v.path.endswith("query/kernel")]
    model.fit(TEXTS, LABELS, batch_size=4, verbose=0)
    after = [v for v in model.non_trainable_weights if v.path.endswith("query/kernel")]
    assert len(raw) == 2
    for one, other in zip(raw, after, strict=True):
        np.testing.assert_array_equal(one, other)
    low = [np.asarray(v) for v in model.trainable_weights if v.path.endswith("lora_kernel_b")]
    assert low and all(v.any() for v in low)
    assert_trains_on_effective_weights(model, plain, model.preprocessor(TEXTS[:4]))


@pytest.mark.filterwarnings("ignore:.*compile\\(\\).*:UserWarning")
def test_the_script_of_the_documentation(tmp_path: Path) -> None:
    """Trains through the model's own `fit`, and loads the file where tfwd is not installed."""
    model = classifier()
    tfwd.parametrize(model, {"query/kernel": P.Dropout(0.1)}, in_place=True)
    model.fit(TEXTS, LABELS, verbose=0)
    tfwd.unwrap(model)
    model.save(tmp_path / "plain.keras")
    with Processes() as started:
        arguments = [str(tmp_path / "plain.keras"), str(tmp_path / "found.npy"), *TEXTS]
        status, output = finish(started.python(LOAD, arguments))
    assert status == 0, output
    expected = model.predict(TEXTS, verbose=0)
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), expected, rtol=1e-6, atol=1e-6)


def test_a_language_model() -> None:
    """Its table is used twice, for the lookup and for the logits, with one mask."""
    model, plain = language_model(), language_model()
    prompts = ["ab c", "fg"]
    before = model.generate(prompts, max_length=8)
    parts = {"token_embedding/embeddings": P.Dropout(0.3), ".*dense/kernel": P.Dropout(0.2)}
    tfwd.parametrize(model, parts, seed=2, in_place=True)
    assert model.generate(prompts, max_length=8) == before
    assert added(model).calls == 0
    model.fit(SENTENCES, batch_size=2, verbose=0)
    assert added(model).calls == 2
    after = model.generate(prompts, max_length=8)
    assert added(model).calls == 2
    inputs = model.preprocessor(SENTENCES[:2])[0]
    # `generate` gives the sampler a seed, which is not a weight of the backbone.
    plain.backbone.set_weights(model.backbone.get_weights())
    assert plain.generate(prompts, max_length=8) == after
    assert_trains_on_effective_weights(model, plain, inputs)
    tfwd.unwrap(model)
    assert not hooked(model)
    assert model.generate(prompts, max_length=8) == after
